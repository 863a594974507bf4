/* A clock ahead of the machine's by what a file says, in seconds: an int64_t that whoever sets it changes in place.

   Preloaded into a process and its children. Only the time of day jumps; the monotonic clock goes on, so that waiting
   takes as long as ever. What waits until a time of day is told the machine's own. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define TIME_OF_DAY_S 1000000000 /* no machine runs for so long: a smaller absolute time is of the monotonic clock */

static const volatile int64_t *ahead_s;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("YEAR_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) ahead_s = mapped;
    close(file);
}

static int64_t ahead(void) { return ahead_s ? *ahead_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += ahead();
    return failed;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return clock_gettime(CLOCK_REALTIME, now) ? 0 : base;
}

static struct timespec machine_time(const struct timespec *end) {
    struct timespec own = *end;
    if (own.tv_sec > TIME_OF_DAY_S) own.tv_sec -= ahead();
    return own;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec own = machine_time(end);
    return next(condition, mutex, &own);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *end) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec own = machine_time(end);
    return next(semaphore, &own);
}
