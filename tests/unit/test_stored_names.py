"""Names in the files of lifecycle homes, and in output that other programs read, may not change.

A home outlives the version that wrote it. Readers refuse unknown fields, so a field that is renamed makes old ledgers,
records, launch orders and caches unreadable; a field may be added, with a default. Classes may be renamed and moved:
rename them here too.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from stages.core.errors import error_classes
from stages.core.launchers.registry import BLOCKS

ROOT = Path(__file__).parents[2]
STORED = """# the ledger of a refresh
Event: time_ms
RefreshBegan: event force git_commit hardware home overrides process recipe recipe_path recipe_text refresh stages
  time_ms until
PlannedEntry: kind reason upstream version
FlowRunKnown: event prefect_flow_run_id prefect_run_count time_ms
StageWaits: event reason stage time_ms
StageCached: artifact attempt event seconds stage time_ms
AttemptBegan: event first_byte num_devices number params stage tags time_ms work
AttemptEnded: energy_j error error_class event files folder last_byte metrics number outcome retried seconds stage
  tags time_ms
StageFailed: error error_class event retried seconds stage time_ms
RefreshEnded: error event seconds state time_ms
RefreshKilled: copied event process time_ms
CompareBegan: event layouts num_rounds num_steps num_warmup_steps stage time_ms
LayoutEntry: engine global_batch_size num_devices params refused tags text
LayoutMeasured: error event layout metrics time_ms
TrialEnded: error error_class event layout metrics round seconds tags time_ms work
# a stage's work folder
StageInput: cache config inputs kind leases name outside trial version warnings
Lease: pid url
Trial: steps
StageEvent: done event message time_ms total unit
StageResult: files lease metrics tags
StageFailure: died error message
AttemptNote: digests token
Findings: problems unseen
InputProblem: error field message stage
Unseen: field message stage
# artifacts
Record: attempt digest files finished git_commit identity kind mlflow_run_id packages product recipe schema_number
  seconds stage started tags upstream version
UpstreamEntry: digest kind stage version
FileEntry: sha256 size
LaunchSpec: adapters base_name engine engine_version for_training model num_tried served_name serving swaps_adapters
Lengths: bin_tokens counts
Verdict: against champion_version differences gates missed name outcome warnings
Champion: evaluations same_model version
ComparedChampion: champion
Difference: candidate difference higher_is_better interval largest name num_samples num_unpaired reference
  standard_error
Gate: bound found least name
Publication: files name removed revision state to
PublishedFile: sent sha256 size_bytes
# the home
HomeIdentity: boot device inode
ServerRecord: deaths home port process settings token
ServerRecords: home is_copy servers
ProcessIdentity: boot host pid pid_namespace started_ticks
Registration: base data description digest evaluations mlflow_run_id model name scores server
RetentionLimits: champions days refreshes
Policy: keep
Shipped: attempts done experiment_id ledger_bytes parent_run_id trouble
ShippedAttempt: done next_byte run_id
Content: amount sha256 text
# jobs of a cluster
JobOrder: heartbeat_patience_s home interruptions_without_progress job kubernetes launcher network_interface nodes
  processes slurm stage stage_command threads work
JobEnd: exit_code job_id
Pointer: address size_bytes tag
SlurmOptions: account cpus_per_node gpus_per_node memory_gib_per_node options partition qos time_limit warning_s
KubernetesOptions: cpus_per_node gpu_resource gpus_per_node image job memory_gib_per_node namespace node_selector
  secrets service_account shared_memory_gib store_claim training_runtime
# caches and scratch folders
Description: bytes_per_token conversations has_margins num_bad_rows num_documents num_good num_over_long num_rows
  num_source_rows num_target_tokens num_tokens packing padding_token sequence_length tool_prompts warnings
TokenizationNotes: bad_rows longest_tokens num_earlier num_kept num_over_long num_source_rows num_text_bytes
  num_text_tokens num_tokenized_rows over_long remarkable tokenizer tool_prompt unread
TokenizerNotes: learned_after_turns num_dropped_thoughts special_tokens teaches_to_stop wrote_date
ToolPrompt: messages token_ids tools variables
Round: first_step groups measured
Group: completions prompt
Completion: log_probabilities reward rewards text token_ids truncated
AnsweredPrompt: advantage completion is_learned log_probabilities prompt
Sample: num_tokens prompt sample seed text truncated
# answers to programs (`--json`)
RefreshReport: answers cost git_commit happened hardware learned_from lineage links means num_tries overrides
  promotions recipe recipe_path refresh scores seconds spans stages started_ms state trainings warnings
StageReport: built_by error error_class kind log_tail metrics name reason seconds state upstream version
Lineage: evaluations name registered tree
Node: config counts damage digest files finished folder git_commit kind media mlflow_run_id product rebuilt recipe
  refresh revision source stage upstream version
LearnedMedia: list_file numbers sha256
ScoredEvaluation: scores stage version
Score: interval name stage standard_error value
Promotion: against differences missed name outcome stage tables
"""
"""Classes that are stored in files of a lifecycle home, with the names of their fields."""
EVENTS = """
attempt_began attempt_ended compare_began flow_run_known layout_measured refresh_began refresh_ended refresh_killed
stage_cached stage_failed stage_waits trial_ended
"""
"""Names of the events in the event log (ledger) of a refresh."""
FILES = """
record.json .record.json attempt.json config.json metrics.jsonl events.jsonl result.json error.json state.json
manifest.json order.json ended.json environment.json ledger.jsonl mlflow.json servers.json servers.key retention.yaml
hardware.yaml matmul-rates.json hashes.sqlite launch.json scores.json verdict.json verdict.md champion.json
publication.json lengths.json prediction.json completions.jsonl bad_rows.jsonl dropped.jsonl judge.jsonl
benchmark.json trained_on.json log_probabilities.json about.json probe.json look.json findings.json note.md
recipe.yaml report.html comparison.json train.jsonl validation.jsonl .sha256
"""
"""Names of files in lifecycle homes, artifacts, work folders and caches, which may not change."""
ERRORS = """
RecipeError=3 LayoutError=4 DataError=5 ModelError=6 DownloadError=7 ResourceError=8 ServerError=9 EvaluationError=10
GateError=11 StoreError=12 StageTimeoutError=13 StageCrashError=14 RefreshStoppedError=15 TrainingError=16
NotPromotedError=17 PublishError=18 LifecycleError=70 TransientError=75 OutdatedVerdictError=76
"""
"""Exit codes of error classes, which ledgers, `error.json` and callers of `lifecycle` rely on."""


def stored():
    """Return the field names that each class stored on disk must keep, parsed from `STORED`."""
    lines = [line for line in STORED.replace("\n  ", " ").splitlines() if line and not line.startswith("#")]
    return {name: set(fields.split()) for name, _, fields in (line.partition(": ") for line in lines)}


@cache
def code():
    """Return all classes in our code, with bases and fields, and all one-line strings."""
    classes, texts = {}, set()
    for file in (file for folder in ("flows", "stages") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                assigned = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                fields = {item.target.id for item in assigned if "ClassVar" not in ast.unparse(item.annotation)}
                classes.setdefault(node.name, []).append((bases, fields))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                texts.add(node.value)
    classes["LauncherBlocks"].append(((), set(BLOCKS)))  # which the registry makes: no syntax tree has them
    return classes, texts


def fields_of(bases, fields):
    """Return the fields of a class with those that it inherits."""
    inherited = (fields_of(*one) for base in bases for one in code()[0].get(base, ()))
    return fields.union(*inherited)


@pytest.mark.parametrize("name", stored())
def test_what_homes_hold_has_the_fields_that_it_had(name):
    frozen = stored()[name]
    assert name in code()[0], f"{name} is gone: where it was renamed, rename it here; what homes hold must be read"
    missing = min((frozen - fields_of(*one) for one in code()[0][name]), key=len)
    assert missing == set(), f"fields of {name} that files in homes have: keep their names"


def test_errors_have_the_names_and_exit_codes_that_ledgers_hold():
    known = {name: error.exit_code for name, error in error_classes().items()}
    frozen = {name: int(code) for name, _, code in (error.partition("=") for error in ERRORS.split())}
    assert {name: known.get(name) for name in frozen} == frozen


def test_events_have_the_names_that_ledgers_hold():
    assert set(EVENTS.split()) - code()[1] == set()


def test_files_have_the_names_that_homes_hold():
    written = {text.rpartition("/")[2] for text in code()[1]}
    assert set(FILES.split()) - written == set()
