"""What users of LangChain's ChatOpenAI write, over both doors. Prints one JSON object: what came of each demand.

langchain_chat.py BASE_URL KEY MODEL SEED STOP
"""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

URL, KEY, MODEL = sys.argv[1:4]
SHORT = 3


def chat(*, responses: bool, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{
            "model": MODEL,
            "base_url": URL,
            "api_key": KEY,
            "max_tokens": SHORT,
            "use_responses_api": responses,
            "stream_usage": True,
            **more,
        }
    )


def invoke(*, responses: bool) -> dict[str, Any]:
    made = chat(responses=responses).invoke("hello")
    return {"text": made.text, "usage": made.usage_metadata, "metadata": sorted(made.response_metadata)}


def stream(*, responses: bool) -> dict[str, Any]:
    pieces = list(chat(responses=responses).stream("hello"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    texts = [piece.text for piece in pieces if piece.text]
    return {"texts": len(texts), "text": "".join(texts), "whole": whole.text, "usage": whole.usage_metadata}


def asynchronous(*, responses: bool) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        model = chat(responses=responses)
        made = await model.ainvoke([SystemMessage("Be brief."), HumanMessage("hello")])
        texts = [piece.text async for piece in model.astream("hello")]
        return {"invoked": made.text, "streamed": "".join(texts)}

    return asyncio.run(run())


def turns(*, responses: bool) -> dict[str, Any]:
    """The second turn sends the first back, as it was answered."""
    model = chat(responses=responses)
    said: list[Any] = [HumanMessage("hello")]
    first = model.invoke(said)
    second = model.invoke([*said, first, HumanMessage("and now?")])
    third = model.invoke([*said, first, HumanMessage("and now?"), second, AIMessage("plain"), HumanMessage("again")])
    return {"prompts": [made.usage_metadata["input_tokens"] for made in (first, second, third)], "text": third.text}


def chain(*, responses: bool) -> dict[str, Any]:
    prompt = ChatPromptTemplate.from_messages([("system", "You speak of {topic}."), ("human", "{question}")])
    ready = prompt | chat(responses=responses) | StrOutputParser()
    asked = [{"topic": "walls", "question": "thick?"}, {"topic": "doors", "question": "open?"}]
    return {"batch": ready.batch(asked), "streamed": "".join(ready.stream(asked[0]))}


def errors(*, responses: bool) -> dict[str, Any]:
    def said(**more: Any) -> list[Any]:
        try:
            chat(responses=responses, **more).invoke("hello")
        except openai.APIStatusError as error:
            kinds = (openai.AuthenticationError, openai.NotFoundError, openai.BadRequestError)
            return [kind.__name__ for kind in kinds if isinstance(error, kind)] + [error.code]
        return ["nothing raised"]

    return {"key": said(api_key="sk-chorus-none"), "model": said(model="none"), "field": said(temperature=9)}


def remembered() -> dict[str, Any]:
    """Turns by reference: what the server has is not sent again."""
    model = chat(responses=True, use_previous_response_id=True)
    first = model.invoke("hello")
    second = model.invoke([HumanMessage("hello"), first, HumanMessage("and now?")])
    return {
        "ids": [made.response_metadata["id"][:5] for made in (first, second)],
        "prompts": [made.usage_metadata["input_tokens"] for made in (first, second)],
    }


def shown(scene: Any) -> Any:
    try:
        return scene()
    except Exception as error:  # it is the result
        return {"raised": f"{type(error).__name__}: {error}"}


SCENES = {"remembered": remembered}
for each in (invoke, stream, asynchronous, turns, chain, errors):
    SCENES[f"chat_{each.__name__}"] = partial(each, responses=False)
    SCENES[f"responses_{each.__name__}"] = partial(each, responses=True)

with ThreadPoolExecutor(len(SCENES)) as pool:  # side by side: the replies are slow on purpose
    results = dict(zip(SCENES, pool.map(shown, SCENES.values()), strict=True))
print(json.dumps({"version": version("langchain-openai"), **results}))  # noqa: T201
