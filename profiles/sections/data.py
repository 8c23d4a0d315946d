"""The sections `tokenizer` and `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from profiles.sections import roles
from profiles.sections.base import Count, Fraction, Natural, Rate, Section, Wide

# Up to 4 epochs repeated tokens are worth almost as much as new ones; after that their value decays (arXiv 2305.16264).
WORTHWHILE_PASSES = 4


class Tokenizer(Section):
    """Where the tokenizer comes from."""

    default_role = roles.TOKENIZER

    source: str = Field(min_length=1)
    """ "train": trained on the data; or a hub repository (org/name), a folder, an s3:// folder, or run:NAME, the export of a
    run"""
    revision: str | None = None
    """commit, tag or branch of a hub repository"""
    vocabulary_size: Annotated[Count | None, roles.VOCABULARY] = None
    """vocabulary size to train; for an existing tokenizer, its size, so that planning can check it"""


class Source(Section):
    """A source of text or tokens."""

    default_role = roles.TEXT

    kind: Literal["python-docs", "files", "hub", "tokens", "megatron"]
    """python-docs: Python's documentation, which comes with Trainshed; files: txt and md, JSON lines or arrays (.jsonl, .json,
    also with .gz, .zst, .xz or .bz2), parquet, arrow, csv; hub: a hub dataset; tokens: a save_to_disk folder with a column of
    token ids; megatron: .bin/.idx files"""
    path: str | None = Field(default=None, min_length=1)
    """files, tokens: a file, folder or glob pattern; megatron: the common prefix of the files or a glob of .idx files; local or
    s3://"""
    repository: str | None = Field(default=None, min_length=1)
    """hub: dataset repository, org/name"""
    config: str | None = Field(default=None, min_length=1)
    """hub: configuration of a dataset that has several"""
    split: str = Field(default="train", min_length=1)
    """hub: split to read"""
    revision: str | None = Field(default=None, min_length=1)
    """hub: commit, tag or branch"""
    streaming: bool = False
    """hub: stream over the network; false: download the files first"""
    text: str | None = Field(default=None, min_length=1)
    """name or dotted path of the field with the text or the token ids; null: data.text"""
    lines: bool = False
    """plain text: one document per line; false: one per file"""
    anonymous: bool = False
    """s3:// paths: read without credentials"""
    weight: Annotated[float | None, roles.ORDER] = Field(default=None, gt=0)
    """share of training samples, relative to the other weights; set for all training sources or none"""
    use: Literal["split", "train", "validation"] = "split"
    """training, validation, or split between both by data.validation_fraction"""


class MixtureChange(Section):
    """A change of the training sources' weights, from a given step on."""

    default_role = roles.SAMPLES

    step: Count
    """first optimizer step with these weights, counted from 1; after a rollback, earlier by the number of steps whose samples
    are excluded"""
    weights: list[Rate] = Field(min_length=1)
    """relative share of each training source, in the order of data.sources; 0: not drawn"""


class Data(Section):
    """Training and validation data."""

    default_role = roles.TOKENS

    sources: list[Source] = Field(min_length=1)
    """sources of training and held-out documents"""
    schedule: Annotated[list[MixtureChange], roles.SAMPLES] = Field(default=[])
    """changes of the sources' weights during training, in the order of their steps"""
    text: Annotated[str, roles.TEXT] = Field(default="text", min_length=1)
    """name or dotted path of the field with a record's text"""
    validation_fraction: Annotated[Fraction, roles.TEXT] = 0.01
    """fraction of documents held out for validation: chosen by hash; for Megatron pairs, the last ones"""
    append_eos: bool = True
    """append the tokenizer's EOS token to every document"""
    prepend_bos: bool = False
    """prepend the tokenizer's BOS token to every document"""
    deduplicate: Annotated[bool, roles.ORDER] = False
    """drop exact duplicates of documents within a source"""
    minimum_length: Natural = 0
    """minimum characters per document; shorter ones are dropped"""
    shuffle_tokens: Annotated[Wide | None, roles.ORDER] = None
    """tokens per shuffle window, if the data does not fit on a node's disk; null: shuffle all data"""
    cache_gigabytes: Annotated[float, Field(gt=0), roles.NONE] = 200.0
    """disk space per node to cache data from s3://"""
    maximum_missing: Annotated[float, Field(ge=0, le=1), roles.NONE] = 0.1
    """fraction of records without text, or unusable for the objective, above which the data is rejected"""
