// What a screen reader hears: whole sentences, each once.
import assert from "node:assert/strict";
import test from "node:test";
import { Sentences } from "../../../services/gateway/web/sentences.js";

test("a sentence is heard when it is whole, and once", () => {
  const heard = new Sentences();
  assert.equal(heard.take("Sleep is"), "");
  assert.equal(heard.take("Sleep is good. It he"), "Sleep is good.");
  assert.equal(heard.take("Sleep is good. It helps! And"), "It helps!");
  assert.equal(heard.take("Sleep is good. It helps! And so on", true), "And so on");
});

test("numbers of a list and points inside words end no sentence", () => {
  const heard = new Sentences();
  assert.equal(heard.take("1. Pi is 3.14 and "), "");
  assert.equal(heard.take("1. Pi is 3.14 and more.\n"), "1. Pi is 3.14 and more.");
});

test("marks are not read out", () => {
  const heard = new Sentences();
  assert.equal(heard.take("## Tips\n- **Rest** with [care](https://a.org).\n"), "Tips Rest with care.");
  assert.equal(heard.take("## Tips\n- **Rest** with [care](https://a.org).\n| Age | Hours |\n|---|--:|\n| 18 | 7 |\n"), "Age Hours 18 7");
});

test("however a text is cut, all of it is heard in order", () => {
  const text = "One two. Three!\nFour? Five six 7.5 eight. Nine";
  for (let step = 1; step < text.length; step += 1) {
    const heard = new Sentences();
    const parts = [];
    for (let at = step; at < text.length; at += step) parts.push(heard.take(text.slice(0, at)));
    parts.push(heard.take(text, true));
    assert.equal(parts.filter(Boolean).join(" "), text.replace("\n", " "), `step ${step}`);
  }
});
