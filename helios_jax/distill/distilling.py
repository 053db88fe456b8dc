"""How does a target, prompts and a shape become a draft? The whole way, in one folder.

    OUT/                            the draft: a native checkpoint, once it is done
    .OUT.distilling/samples/        what the target says, for every model, or every head, that
                                    is made of it
    .OUT.distilling/training/HASH/  one training: of one student, plan and data

Interrupted work goes on where it was when the same call is made again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.calibrate.data import read_units
from helios_jax.calibrate.folders import locked
from helios_jax.config import ModelConfig, require
from helios_jax.distill import store
from helios_jax.distill.architectures import (
    PrunedShape,
    check_vocab_tokens,
    dense,
    draft_config,
    initialise,
    num_params,
    prune,
    reduce_vocabulary,
)
from helios_jax.distill.on_policy import sampler
from helios_jax.distill.sampling import SamplingPlan, sample
from helios_jax.distill.teacher import Teacher
from helios_jax.distill.trainer import Progress, Trained, TrainingPlan, split, sum_of, train
from helios_jax.llm import LLM, load
from helios_jax.model import Transformer, model_of
from helios_jax.model.params import Params
from helios_jax.quant import Scheme, rtn
from helios_jax.speculative import DraftVocabulary
from helios_jax.speculative.pairing import (
    TARGET_FINGERPRINT,
    params_fingerprint,
    require_same_tokens,
)
from helios_jax.tokenizer import Tokenizer

_REDUCED = "draft_vocabulary_tokens"


@dataclass(frozen=True)
class DraftShape:
    """What the draft is.

    Attributes:
      pruned: what is kept of the target; None for a shape of its own.
      config: fields of `ModelConfig` that differ from the target's, where it is not pruned.
      vocab_tokens: the most frequent tokens of the samples that it knows; None for all.
      bits: its matrices are stored with, 8 or 4 in groups of 64; None for bfloat16.
    """

    pruned: PrunedShape | None = None
    config: tuple[tuple[str, Any], ...] = ()
    vocab_tokens: int | None = None
    bits: int | None = 8

    def __post_init__(self):
        require(
            (self.pruned is None) != (not self.config),
            f"pruned={self.pruned}, config={self.config}: one of them says what the draft is",
        )
        require(self.bits in (None, 4, 8), f"bits={self.bits}: must be 4, 8 or None (bfloat16)")

    @property
    def is_head(self) -> bool:
        return bool(dict(self.config).get("is_draft_head"))

    def check(self, target: ModelConfig) -> None:
        """Raises ValueError where a target of this configuration has no such draft."""
        if self.pruned is not None:
            self.pruned.check(target)
        else:
            draft_config(target, **dict(self.config))
        if self.vocab_tokens is not None:
            check_vocab_tokens(self.vocab_tokens, target.vocab_size, _always(target))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self) | {"config": dict(self.config)}


class Student(NamedTuple):
    """config, params: float32, not fused; vocabulary: None where it has all of the target's."""

    config: ModelConfig
    params: Params
    vocabulary: DraftVocabulary | None


def load_target(path: Path, *, dtype: str, max_model_len: int, max_num_seqs: int) -> LLM:
    """The target as it samples: no prefix caching, see `sampling`."""
    from checkpoints_conv import open_checkpoint

    return load(
        path, dtype=dtype, max_num_seqs=max_num_seqs,
        max_model_len=min(max_model_len, open_checkpoint(path).config.max_model_len),
        max_num_batched_tokens=1024, enable_prefix_caching=False, seed=0,
    )  # fmt: skip


def read_prompts(paths: Sequence[Path], tokenizer: Tokenizer, max_length: int) -> list[list[int]]:
    """Token ids of every distinct prompt of some files, cut to `max_length` at the end.

    Raises:
      ValueError: naming the file that cannot be used.
    """
    require(
        max_length >= 1, f"prompts: max_model_len leaves {max_length} tokens for them; raise it"
    )
    units = [
        unit[:max_length] for path in paths for unit in read_units(path, tokenizer, max_length)
    ]
    return [list(unit) for unit in dict.fromkeys(map(tuple, units))]


def target_identity(path: Path) -> dict[str, Any]:
    """What a target is known by, JSON-ready.

    Raises:
      ValueError: not a native checkpoint: only those have sums.
    """
    manifest = path / "manifest.json"
    require(
        manifest.is_file(),
        f"target {path}: must be a native checkpoint, whose weights have sums; convert it with "
        "`helios convert`",
    )
    return {TARGET_FINGERPRINT: params_fingerprint(json.loads(manifest.read_text()))}


def sample_target(
    target: Path,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    plan: SamplingPlan,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    warn: Callable[[str], None] = lambda message: None,
) -> store.Store:
    """`sampling.sample` of a target on the disk."""
    described = json.dumps([list(map(int, prompt)) for prompt in prompts])
    identity = {
        **target_identity(target),
        "dtype": llm.dtype_report,
        "prompts_sha256": hashlib.sha256(described.encode()).hexdigest(),
    }
    return sample(llm, prompts, plan, folder, identity, progress, warn)


def make_student(
    shape: DraftShape,
    target_config: ModelConfig,
    target_params: Params,
    sequences: Sequence[store.Sequence],
    seed: int = 0,
) -> Student:
    """The draft before training.

    Args:
      target_config: as it serves (`LLM.config`), with all tokens that end a sequence.
      target_params: as they are stored.
      sequences: sampled; a reduced vocabulary has the most frequent tokens of them.
    """
    vocabulary = None
    if shape.vocab_tokens is not None:
        counts_V = np.zeros(target_config.vocab_size, np.int64)
        for sequence in sequences:
            np.add.at(counts_V, sequence.tokens[sequence.num_prompt :], 1)
        table = target_params["params"]["embed"]["embedding"]
        table = table.dequantize() if hasattr(table, "dequantize") else table
        vocabulary = reduce_vocabulary(
            counts_V, np.asarray(table), shape.vocab_tokens, _always(target_config)
        )
    if shape.pruned is not None:
        config, params = prune(target_config, target_params, shape.pruned, vocabulary)
    else:
        config = draft_config(target_config, vocabulary, **dict(shape.config))
        params = initialise(config, jax.random.key(seed), target_params, vocabulary)
    return Student(config, params, vocabulary)


def train_student(
    student: Student,
    sequences: Sequence[store.Sequence],
    plan: TrainingPlan,
    folder: Path,
    identity: Mapping[str, Any],
    *,
    teacher: Teacher | None = None,
    sampling: SamplingPlan | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Trained:
    """`trainer.train` in a folder below `folder` that belongs to one student, plan and data.

    The student's own samples begin with the prompts of training sequences, never with held-out
    ones.

    Args:
      identity: JSON-ready, of the data.
      teacher, sampling: needed for on-policy data.

    Raises:
      ValueError: another process trains there.
    """
    vocabulary = student.vocabulary
    tokens = () if vocabulary is None else (vocabulary.ids_U, vocabulary.nearest_V)
    described = {
        **identity, "plan": plan.to_dict(), "student": student.config.to_dict(),
        "student_sha256": sum_of((student.params, tokens)),
        "on_policy": None if sampling is None else sampling.to_dict(),
    }  # fmt: skip
    text = json.dumps(described, sort_keys=True)
    own = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    with locked(own, "training"):
        model = model_of(student.config)
        on_policy = None
        if plan.on_policy and isinstance(model, Transformer):
            require(
                teacher is not None and sampling is not None,
                f"on_policy={plan.on_policy}: needs the teacher and a sampling plan",
            )
            assert teacher is not None and sampling is not None
            training, _ = split(sequences, plan)
            prompts = dict.fromkeys(tuple(s.tokens[: s.num_prompt].tolist()) for s in training)
            on_policy = sampler(
                model, teacher, list(prompts), sampling, plan.on_policy_sequences,
                own / "on_policy", described, vocabulary,
            )  # fmt: skip
        return train(
            model, student.params, sequences, plan, own, vocabulary=vocabulary,
            on_policy=on_policy, report=report,
        )  # fmt: skip


def write_draft(
    student: Student,
    params: Params,
    tokenizer: Tokenizer,
    out: Path,
    source: Mapping[str, Any],
    bits: int | None,
    overwrite: bool = False,
) -> None:
    """A native checkpoint of a draft.

    Args:
      params: the trained ones.
      source: JSON-ready, for the manifest.
      bits: see `DraftShape`.
    """
    from checkpoints_conv import Checkpoint, write_checkpoint

    leaves = dict(_stored(params, bits))
    config = student.config
    checkpoint = Checkpoint(
        path=out,
        format="native",
        config=config,
        generation={},
        num_tensors=len(leaves),
        nbytes=sum(leaf.nbytes for tree in leaves.values() for leaf in jax.tree.leaves(tree)),
        read_leaves=lambda: iter(_in_order(leaves, config)),
        read_tokenizer=lambda: tokenizer,
        describe_source=lambda: {
            **source, "num_params": num_params(params), _REDUCED: _reduced(student)
        },
        draft_vocabulary=student.vocabulary,
    )  # fmt: skip
    write_checkpoint(checkpoint, out, overwrite=overwrite)


def read_draft(path: Path, tokenizer: Tokenizer) -> Student:
    """A draft on the disk, dequantised, to go on training with (`--init`).

    Args:
      tokenizer: the target's.

    Raises:
      ValueError: the draft's tokens are not the target's.
    """
    from checkpoints_conv import open_checkpoint, read_params

    checkpoint = open_checkpoint(path)
    require_same_tokens(tokenizer, checkpoint.tokenizer)
    params = dense(read_params(checkpoint))
    return Student(checkpoint.config, params, checkpoint.draft_vocabulary)


def _always(config: ModelConfig) -> list[int]:
    """Tokens that every draft's vocabulary has: those that begin and end a sequence."""
    special = {config.bos_token_id, *config.eos_token_ids}
    return sorted(token for token in special if token is not None)


def _stored(params: Params, bits: int | None):
    """(path, leaf) as they are written: matrices rounded, vectors in float32."""
    import ml_dtypes

    for path, leaf in jax.tree_util.tree_flatten_with_path(params["params"])[0]:
        names = tuple(key.key for key in path)
        leaf = np.asarray(leaf, np.float32)
        if leaf.ndim < 2:
            yield names, leaf
            continue
        is_table = names[-1] == "embedding"
        in_features = leaf.shape[1] if is_table else leaf.shape[0]
        if bits is None or in_features % 64:
            yield names, leaf.astype(ml_dtypes.bfloat16)
            continue
        scheme = Scheme(bits, 64)
        rounded = rtn(jnp.asarray(leaf if is_table else leaf.T), scheme)
        yield names, jax.tree.map(np.asarray, rounded)


def _in_order(leaves: dict, config: ModelConfig):
    from checkpoints_conv.tree import expected_leaves

    return [(path, leaves[path]) for path in expected_leaves(config)]


def _reduced(student: Student) -> int | None:
    return None if student.vocabulary is None else len(student.vocabulary.ids_U)
