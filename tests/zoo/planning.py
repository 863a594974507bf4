"""Proof that the planner knows a family: parameters, FLOPs, and a layout that fits."""

import subprocess
import sys
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from flows.planning.layout_advice import LayoutOptions, ranked, search_request
from stages.models.facts import ModelFacts
from stages.models.flops import attended_pairs
from stages.models.loading import build_model, class_with_head, load_config
from stages.models.walked import PROGRAM, answer_to, question_about

MOST_FLOPS_ERROR = 0.02
NUM_TOKENS = 64
"""Tokens of a row whose FLOPs are counted: as many as the tiny models have positions, and a chunk of states has."""


def planner(folder):
    """Measure the layers: the model's own number of parameters, FLOPs as torch counts them (2%), and a layout fits."""
    keep_shape(folder)
    request, model = search_request(str(folder), LayoutOptions(8, "h100-80gb")), built(folder)
    shape = request.shape
    expected = sum(one.numel() for one in model.parameters())
    if shape.num_parameters != expected:
        return f"{shape.num_parameters} parameters instead of {expected}"
    flops, counted = forward_flops(shape, model)
    if abs(flops - counted) > MOST_FLOPS_ERROR * counted:
        return f"{flops / counted:.1%} of the FLOPs that torch counts"
    return "yes" if ranked(request, 1).result.fitting else "no layout fits"


def keep_shape(folder):
    """Walk through the folder's model, if that is not kept, in a fork of one program for all models."""
    question = question_about(ModelFacts(folder))
    if not (kept := answer_to(question)).is_file():
        walks = _program()
        print(question, file=walks.stdin, flush=True)
        if answer := walks.stdout.readline():  # else the walk failed, and is tried again by the planner, which says why
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(answer)
        else:
            _program.cache_clear()


@cache
def _program():
    """Return the program that walks."""
    command = [sys.executable, "-m", PROGRAM]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end_program():
    """End the program that walks, which reads questions until there are no more."""
    if _program.cache_info().currsize:
        _program().communicate()
        _program.cache_clear()


def built(folder):
    """Return the model of a folder, of language or of images and text, with new weights."""
    config = load_config(folder)
    head = "tokens" if class_with_head(config, "tokens") else "pictures"
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return build_model(config, head=head, device="cpu", **options).eval()


@torch.no_grad()
def forward_flops(shape, model):
    """Return the FLOPs of a forward pass over a row, as the planner has them and as torch counts them.

    torch's are without pairs of tokens that no kernel computes, since a mask or a window hides them, and the planner's
    with the products of experts that code computes and drops (Llama 4).
    """
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.int64), use_cache=False)
    flops = shape.flops()
    hidden = sum(
        2 * work.width * (NUM_TOKENS**2 - attended_pairs(NUM_TOKENS, work.window_tokens)) for work in flops.attention
    )
    dropped = sum(
        len(kind.layers) * (kind.experts_computed - kind.experts_per_token) * one.inputs * one.outputs
        for kind in shape.kinds
        for one in kind.experts
    )
    computed = flops.forward([NUM_TOKENS], NUM_TOKENS) + 2 * NUM_TOKENS * dropped
    return computed, counter.get_total_flops() - hidden
