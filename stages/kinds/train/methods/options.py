"""Fields of a training stage that depend on the registered methods: `method`, and a block of options for each."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, create_model, model_validator

from stages.core.contract import ModelReference, StageConfig
from stages.core.fields import AddedLater, StrictModel
from stages.kinds.train.methods.method import Method, OnPolicySteps, TeacherServer, TeacherTokens
from stages.kinds.train.methods.registry import METHODS
from stages.kinds.train.methods.rollouts import RolloutOptions, SamplingOptions

if TYPE_CHECKING:  # what there is depends on the registry, which no type checker runs
    MethodName = str
    MethodBlocks = StageConfig
else:
    MethodName = Literal[tuple(METHODS)]
    MethodBlocks = create_model(
        "MethodBlocks",
        __base__=StageConfig,
        __module__=__name__,
        **{
            method.name: (
                method.options | None if method.is_null_in_identity else Annotated[method.options | None, AddedLater()],
                Field(None, description=f"Only with `method: {method.name}`."),
            )
            for method in METHODS.values()
            if method.options
        },
    )


class MethodFields(MethodBlocks):
    """Config fields `method` and the options of each method; only the chosen method's options may be set."""

    method: MethodName
    teacher: Annotated[ModelReference | None, AddedLater()] = Field(
        None,
        description="Stage that provides the teacher's model; its tokenizer must be the same.",
    )

    @property
    def learning(self) -> Method:
        """Chosen training method, with its options and needs."""
        return METHODS[self.method]

    @property
    def method_options(self) -> StrictModel | None:
        return dict(self).get(self.method)

    @property
    def rollouts(self) -> RolloutOptions | None:
        options = self.method_options
        return options if isinstance(options, RolloutOptions) and self.learning.needs_rollouts else None

    @property
    def on_policy(self) -> OnPolicySteps | None:
        """Training steps that learn from the model's own answers to the rows' prompts; None if there are none."""
        return self.learning.on_policy(self.method_options)

    @property
    def sampling(self) -> SamplingOptions | None:
        """Options of sampling from the trained model; None where nothing is sampled."""
        return self.on_policy.sampling if self.on_policy else self.rollouts

    @property
    def sampling_block(self) -> str:
        """Field of the recipe that holds the sampling options, such as `grpo` or `distill.sampling`."""
        return self.method if self.rollouts else f"{self.method}.sampling"

    @property
    def needs_reference(self) -> bool:
        return self.learning.needs_reference(self.method_options)

    @property
    def teacher_tokens(self) -> TeacherTokens | None:
        return self.learning.asks_teacher(self.method_options)

    @property
    def teacher_server(self) -> TeacherServer | None:
        return self.teacher_tokens.server if self.teacher_tokens else None

    @property
    def needs_divergence(self) -> bool:
        return self.learning.needs_divergence(self.method_options)

    @model_validator(mode="after")
    def _default_options(self) -> Self:
        """Fill in the default options of the chosen method.

        Not in a `before` validator: beside one, pydantic takes no list of JSON for a tuple.
        """
        if self.learning.options and self.method_options is None:
            object.__setattr__(self, self.method, self.learning.options())
        return self

    @model_validator(mode="after")
    def _teacher_where_there_is_one(self) -> Self:
        if self.teacher and not self.teacher_tokens:
            raise ValueError(f"`teacher` is {self.teacher}, but `method: {self.method}` has no teacher; remove it")
        if self.teacher_tokens and not (self.teacher or self.teacher_server):
            raise ValueError(
                f"`method: {self.method}` learns from a teacher; name the stage of its model (`teacher`), or its "
                f"server (`{self.method}.teacher_server`)"
            )
        if self.teacher and self.teacher_server:
            raise ValueError(
                f"`teacher` is {self.teacher}, and `{self.method}.teacher_server` names another one; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _options_of_the_method_only(self) -> Self:
        for name, value in self:
            if name in METHODS and name != self.method and value is not None:
                raise ValueError(
                    f"`{name}` is set but `method` is {self.method}; remove `{name}` or say `method: {name}`"
                )
        return self
