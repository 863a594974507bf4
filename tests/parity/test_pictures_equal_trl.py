"""Losses and gradients of documents with pictures equal TRL's, on the batches that TRL's own collators make."""

from dataclasses import replace

import datasets
import pytest
import torch
import trl
from transformers import AutoProcessor

from stages.data.media.folder import MediaFolder
from stages.engines.fsdp.model import load_model
from stages.engines.media import with_media
from stages.kinds.train.methods import dpo, grpo, kto, sft
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing
from stages.models.processor import MediaProcessor
from stages.rollouts.pictures import PromptPictures
from tests.unit.stages.kinds.train.methods import against_trl
from tests.zoo.pictures import load_seeing, picture, save_family

NIGHTLY = ("qwen2_5_vl", "gemma3", "llava", "llava_onevision", "internvl", "mistral3", "glm4v", "idefics3")
PICTURES = [[picture((40, 40), 1)], [picture((64, 40), 2)], [picture((48, 90), 3)]]
NOISE = 0.02
"""Standard deviation of the differences between the policy's weights and the reference's."""
LARGEST = 1e-5
"""Largest relative difference of losses and gradients."""


def said(role, *texts):
    return [[{"role": role, "content": text}] for text in texts]


QUESTIONS = said("user", "n1 n2 n3", "n4 n5", "n6")
GOOD, BAD = said("assistant", "n7 n8 n9", "n10", "n11 n12"), said("assistant", "n13", "n14 n15", "n16 n17 n18")


class Seeing:
    """Model that sees, twice, from one folder: as Transformers has it, for TRL, and as our engine runs it."""

    def __init__(self, folder):
        self.theirs, self.processor = load_seeing(folder), AutoProcessor.from_pretrained(folder)
        self.ours = load_model(folder, reads_weights=True, trust_remote_code=False, sees=["image"])
        self.see = MediaProcessor(folder)

    def batch_of_trl(self, scratch, kind, config, *reference, **columns):
        """Return TRL's trainer, and what its collator makes of rows with these columns and the pictures."""
        options = {name: value for name, value in against_trl.ARGUMENTS.items() if hasattr(config, name)}
        arguments = config(output_dir=str(scratch), max_length=None, **options)
        rows = datasets.Dataset.from_dict({**columns, "images": PICTURES})
        rows = rows.cast_column("images", datasets.List(datasets.Image()))
        trainer = kind(self.theirs, *reference, args=arguments, train_dataset=rows, processing_class=self.processor)
        return trainer, trainer.data_collator(list(trainer.train_dataset))

    def packed(self, inputs, learned, numbers, prefix=""):
        """Return documents of TRL's batch as our packed row. learned: mask of the tokens with loss; numbers: order."""
        ids, masks = inputs[f"{prefix}input_ids"], inputs[f"{prefix}attention_mask"].bool()
        documents, flags = ([one[number][masks[number]] for number in numbers] for one in (ids, learned.bool()))
        images = [PICTURES[number % len(PICTURES)] for number in numbers]
        return with_media(against_trl.packed(documents, flags), images, self.see)

    def check(self, expected, loss, batch):
        """Assert that our loss and its gradient are those of TRL."""
        found, _ = loss(self.ours(batch), batch.signal, loss.counts(batch.signal))
        assert found.item() == pytest.approx(expected.item(), rel=LARGEST)
        wanted, gradients = (self.gradients(*one) for one in ((self.theirs, expected), (self.ours.causal_lm, found)))
        assert wanted.keys() == gradients.keys()
        difference, whole = (
            torch.stack([one.norm() for one in many]).norm()
            for many in ([wanted[name] - gradients[name] for name in wanted], wanted.values())
        )
        assert difference <= LARGEST * whole

    def gradients(self, model, loss):
        model.zero_grad()
        loss.backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.fixture(scope="module", params=["qwen3_vl", *(pytest.param(one, marks=pytest.mark.nightly) for one in NIGHTLY)])
def seeing(request, tmp_path_factory):
    return Seeing(save_family(request.param, tmp_path_factory.mktemp("family")))


@pytest.fixture
def reference(seeing):
    """Provide the reference as Transformers has it, and our engine's log-probabilities of it; the policy moves off."""
    folder = seeing.see.folder
    ours = load_model(folder, reads_weights=True, trust_remote_code=False, sees=["image"])
    torch.manual_seed(0)
    for parameter in seeing.theirs.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    seeing.ours.causal_lm.load_state_dict(seeing.theirs.state_dict())
    return load_seeing(folder), ours


@torch.no_grad()
def of_documents(model, batch):
    return batch.signal.log_probabilities(model(batch))


def test_supervised_training_but_for_tokens_of_pictures(seeing, tmp_path):
    messages = [question + answer for question, answer in zip(QUESTIONS, GOOD, strict=True)]
    trainer, inputs = seeing.batch_of_trl(tmp_path, trl.SFTTrainer, trl.SFTConfig, messages=messages)
    of_pictures = torch.isin(inputs["input_ids"], torch.tensor(sorted(seeing.see.media_token_ids)))
    assert (inputs["labels"][of_pictures] != -100).all(), "TRL learns tokens of pictures"
    inputs["labels"][of_pictures] = -100
    batch = seeing.packed(inputs, inputs["labels"] != -100, range(3))
    seeing.check(trainer.compute_loss(trainer.model, inputs), sft.SftLoss(), batch)


def test_preferences(seeing, reference, tmp_path):
    columns = {"prompt": QUESTIONS, "chosen": GOOD, "rejected": BAD}
    trainer, inputs = seeing.batch_of_trl(tmp_path, trl.DPOTrainer, trl.DPOConfig, reference[0], **columns)
    batch = seeing.packed(inputs, inputs["completion_mask"], (0, 3, 1, 4, 2, 5))  # TRL has all chosen ones first
    batch = batch.with_reference(of_documents(reference[1], batch))
    seeing.check(trainer.compute_loss(trainer.model, inputs), dpo.DPO.build_loss(dpo.DpoConfig()), batch)


def test_labelled_answers(seeing, reference, tmp_path):
    labels = [True, False, True]
    columns = {"prompt": QUESTIONS, "completion": GOOD, "label": labels}
    trainer, inputs = seeing.batch_of_trl(tmp_path, trl.KTOTrainer, trl.KTOConfig, reference[0], **columns)
    batch, other = (
        seeing.packed(inputs, inputs[f"{prefix}completion_mask"], range(3), prefix) for prefix in ("", "KL_")
    )
    kl = (of_documents(seeing.ours, other) - of_documents(reference[1], other)).mean().clamp(min=0).item()
    batch = batch.with_reference(of_documents(reference[1], batch)).with_signal(is_good=torch.tensor(labels), kl=kl)
    seeing.check(trainer.compute_loss(trainer.model, inputs), kto.KTO.build_loss(kto.KtoConfig()), batch)


SAMPLED = [[7, 8, 9], [10], [11, 12], [13, 14], [15], [16, 17, 18]]
"""Completions, two of each prompt, as token ids."""
ADVANTAGES = [0.5, -0.5, 1.0, -1.0, -0.25, 0.75]


def test_completions_of_prompts_with_pictures(seeing, tmp_path):
    """GRPO's loss on completions that other weights sampled, packed with their prompts' pictures, is TRL's."""
    kind = {"loss_type": "grpo", "epsilon": 0.003, "beta": 0.0}
    arguments = {**against_trl.ARGUMENTS, **kind, "num_generations": 2}
    rows = datasets.Dataset.from_dict({"prompt": QUESTIONS, "images": PICTURES})
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    config = trl.GRPOConfig(output_dir=str(tmp_path), **arguments)
    trainer = trl.GRPOTrainer(
        seeing.theirs,
        lambda completions, **_: [0.0] * len(completions),
        config,
        rows,
        processing_class=seeing.processor,
    )
    trainer.current_gradient_accumulation_steps = 1
    texts, images = [], []
    for question, pictures in zip(QUESTIONS, PICTURES, strict=True):
        parts = [{"type": "image"}, {"type": "text", "text": question[0]["content"]}]
        text = seeing.processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        texts, images = [*texts, text, text], [*images, pictures, pictures]
    options = {"padding": True, "padding_side": "left", "add_special_tokens": False, "return_tensors": "pt"}
    inputs = dict(seeing.processor(text=texts, images=images, **options))
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    length = max(map(len, SAMPLED))
    answers = torch.tensor([one + [0] * (length - len(one)) for one in SAMPLED])
    answered = torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in SAMPLED])
    for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        inputs[name] = torch.cat([inputs[name], torch.zeros_like(answers)], 1)
    inputs |= {"num_images": [1] * len(SAMPLED)}
    whole = (torch.cat([ids, answers], 1), torch.cat([mask, answered], 1), length)
    with torch.no_grad():
        old, *_ = trainer._get_per_token_logps_and_entropies(seeing.theirs, *whole, **inputs)
    inputs |= {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": answers, "completion_mask": answered}
    inputs |= {"advantages": torch.tensor(ADVANTAGES), "old_per_token_logps": old}

    for number, (image,) in enumerate(PICTURES):
        image.save(tmp_path / f"{number}.png")
    folder = MediaFolder.of(tmp_path, ())
    references = [folder.reference("image", f"{number}.png", None) for number in range(3)]
    documents = [
        AnsweredPrompt(
            ids[number][mask[number].bool()].tolist(),
            answer,
            [0.0] * len(answer),
            ADVANTAGES[number],
            pictures=PromptPictures([], (references[number // 2],), folder),
        )
        for number, answer in enumerate(SAMPLED)
    ]
    batch = Packing(2048, 2048, True, 1, 0, processor=seeing.see).batch([documents]).seen()
    with torch.no_grad():
        rollouts = replace(batch.signal.rollouts, old_log_probabilities=seeing.ours(batch))
    batch = batch.with_signal(rollouts=rollouts)
    torch.manual_seed(0)
    for parameter in seeing.theirs.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    seeing.ours.causal_lm.load_state_dict(seeing.theirs.state_dict())
    loss = grpo.GrpoLoss(grpo.GrpoConfig(**kind, importance_sampling_correction=False))
    seeing.check(trainer.compute_loss(trainer.model, inputs), loss, batch)
