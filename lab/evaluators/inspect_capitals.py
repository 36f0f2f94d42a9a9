"""A task for Inspect. It asks the questions of ``capitals.csv`` as a multiple choice, and as a
function that the model must call."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample, csv_dataset
from inspect_ai.scorer import Score, Scorer, Target, accuracy, choice, scorer, stderr
from inspect_ai.solver import TaskState, generate, multiple_choice, use_tools
from inspect_ai.tool import Tool, tool


def _sample(record: dict[str, str]) -> Sample:
    choices = [record["right"], record["wrong1"], record["wrong2"], record["wrong3"]]
    question = f"What is the capital of {record['country']}?"
    return Sample(input=question, choices=choices, target="A", metadata={"right": record["right"]})


QUESTIONS = csv_dataset(str(Path(__file__).parent / "capitals.csv"), _sample)


@task
def capitals() -> Task:
    QUESTIONS.shuffle_choices(seed=0)
    return Task(dataset=QUESTIONS, solver=multiple_choice(), scorer=choice())


@tool
def remember() -> Tool:
    async def execute(country: str, capital: str) -> str:
        """Remember the capital of a country.

        Args:
            country: The country.
            capital: Its capital.
        """
        return f"The capital of {country} is {capital}."

    return execute


@scorer(metrics=[accuracy(), stderr()])
def remembered() -> Scorer:
    """Score whether the function received the capital. ``includes`` reads only the model's text,
    which a forced call leaves empty."""

    async def score(state: TaskState, target: Target) -> Score:
        result = state.messages[-1].text
        return Score(value=target.text in result, answer=result)

    return score


@task
def calls() -> Task:
    samples = [
        Sample(input=str(q.input), target=str(q.metadata["right"])) for q in QUESTIONS if q.metadata
    ]
    solver = [use_tools(remember(), tool_choice="any"), generate(tool_calls="single")]
    return Task(dataset=MemoryDataset(samples), solver=solver, scorer=remembered())
