"""Share of a step that training waits for pictures, decoded and processed a step ahead, with an engine that sleeps.

Pixels stay bytes here, as `stages.models.pixels` says: the engine would normalise them in its forward pass.

taskset -c 0 python -m tests.benchmarks.picture_waiting [TOKENS_PER_S]   # by default 10,000; pictures of 1280 × 960
"""

import io
import sys
import tempfile
import time
from pathlib import Path

import torch

from stages.data.media.images import decode_picture
from stages.engines.fsdp.packed import packed
from stages.engines.media import with_media
from stages.kinds.train.batches import prefetched
from tests.zoo.pictures import MediaProcessor, picture, save_family

SIZE = (1280, 960)
PICTURES_PER_STEP, NUM_STEPS = 8, 12
PIXELS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 1280 * 28 * 28}


def photograph(seed):
    """Return a JPEG as smooth as a photograph."""
    data = io.BytesIO()
    picture((SIZE[0] // 8, SIZE[1] // 8), seed).resize(SIZE).save(data, "JPEG", quality=90)
    return data.getvalue()


def main(tokens_per_s):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        media = MediaProcessor(save_family("qwen2_5_vl", Path(name)))
        # As published: patches of 14 × 14, and at most 1,280 tokens.
        media._processor.image_processor.size, media._processor.image_processor.patch_size = PIXELS, 14
        ids, files = torch.tensor(media.token_ids(SIZE)), [photograph(seed) for seed in range(PICTURES_PER_STEP)]

        def load(_):
            return with_media(packed([ids] * len(files)), [[decode_picture(data)] for data in files], media)

        load(0)
        waited_s, step_s = 0.0, len(files) * len(ids) / tokens_per_s
        began_cpu_s, batches = time.process_time(), prefetched(load, range(NUM_STEPS))
        next(batches)
        began_s = time.perf_counter()
        for _ in range(NUM_STEPS - 1):
            time.sleep(step_s)  # the engine
            asked_s = time.perf_counter()
            next(batches)
            waited_s += time.perf_counter() - asked_s
        share = waited_s / (time.perf_counter() - began_s)
        cpu_ms = 1e3 * (time.process_time() - began_cpu_s) / (NUM_STEPS * len(files))
    print(f"a picture has {len(ids)} tokens and takes {cpu_ms:.0f} CPU-ms; {share:.1%} of a step is waiting for them")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1e4)
