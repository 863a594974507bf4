#!/bin/sh
# Slurm runs a copy of this on the first node: PYTHON CODE_FOLDER LAUNCH_FOLDER PATH, never words of a recipe.
export PYTHONPATH="$2" PATH="$4"
exec "$1" -m flows.launch.slurm_batch "$3"
