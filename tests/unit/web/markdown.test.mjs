// Markdown to objects: what models write is read as meant, and reading it piece by piece changes nothing.
import assert from "node:assert/strict";
import test from "node:test";
import { inline, plain, safeHref } from "../../../services/gateway/web/inline.js";
import { Markdown, parse } from "../../../services/gateway/web/markdown.js";

const types = (text, open) => parse(text, open).map((block) => block.type);
const words = (text) => plain(inline(text));

test("blocks of every kind are told apart", () => {
  const text = "# A\n\ntext\nmore\n- one\n- two\n\n1. first\n2. second\n\n> said\n\n---\n```py\nx = 1\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |";
  assert.deepEqual(types(text), ["heading", "paragraph", "list", "list", "quote", "rule", "code", "table"]);
});

test("a fenced block keeps its text and its language, and ends only at its own fence", () => {
  const [block] = parse("````js title\nconst a = `x`;\n```\n  b\n````\n");
  assert.equal(block.lang, "js");
  assert.equal(block.text, "const a = `x`;\n```\n  b");
});

test("an unclosed fence runs to the end, and half a closing fence is not shown", () => {
  assert.equal(parse("```\na\n``", true)[0].text, "a");
  assert.equal(parse("```\na\n``", false)[0].text, "a\n``");
});

test("lists nest by indentation and keep their first number", () => {
  const [list] = parse("3. three\n   - inner\n     still inner\n\n   para\n4. four\nlazy");
  assert.equal(list.first, 3);
  assert.equal(list.items.length, 2);
  assert.deepEqual(list.items[0].blocks.map((block) => block.type), ["paragraph", "list", "paragraph"]);
  assert.equal(plain(list.items[1].blocks[0].inline), "four\nlazy");
});

test("a year at the start of a line does not make a list of a paragraph", () => {
  assert.deepEqual(types("It was in\n1984. A good year."), ["paragraph"]);
});

test("a table row has as many cells as its head, and a bar can be escaped", () => {
  const [table] = parse("| a | b |\n|:-:|---|\n| x \\| y |\n| 1 | 2 | 3 |");
  assert.deepEqual(table.rows.map((row) => row.map(plain)), [["x | y", ""], ["1", "2"]]);
  assert.deepEqual(table.align, ["center", null]);
});

test("empty cells stay in their places", () => {
  const [table] = parse("| a | b | c |\n|---|---|---|\n|| x ||\n| | | y |");
  assert.deepEqual(table.rows.map((row) => row.map(plain)), [["", "x", ""], ["", "", "y"]]);
});

test("nesting has an end", () => {
  assert.equal(parse(">".repeat(5000) + " deep").length, 1);
  assert.equal(parse("- ".repeat(5000) + "deep").length, 1);
});

test("emphasis, code, strikes and links are read", () => {
  assert.deepEqual(inline("a **b *c*** `d*` ~~e~~"), [
    "a ",
    { mark: "strong", kids: ["b ", { mark: "em", kids: ["c"] }] },
    " ",
    { mark: "code", text: "d*" },
    " ",
    { mark: "del", kids: ["e"] },
  ]);
});

test("what is no mark stays as it was written", () => {
  for (const text of ["2 * 3 * 4", "snake_case_name", "a ** b", "[1] and [2]", "`open", "5 < 6 & 7 > 3", "**", "~x~", "<script>alert(1)</script>"]) {
    assert.equal(words(text), text);
    assert.ok(inline(text).every((node) => typeof node === "string"), text);
  }
});

test("only web and mail addresses become links", () => {
  for (const address of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "//evil", "/v1/models", "vbscript:x", " javascript:x", "https://", "file:///x"]) {
    assert.equal(safeHref(address), null, address);
    assert.ok(!JSON.stringify(inline(`[x](${address})`)).includes('"link"'), address);
  }
  assert.equal(safeHref("HTTPS://example.org/a b"), "https://example.org/a%20b");
  assert.deepEqual(inline("[mail](mailto:a@b.c)"), [{ mark: "link", href: "mailto:a@b.c", kids: ["mail"] }]);
});

test("a bare address is a link, without the full stop after it, and never inside another", () => {
  assert.deepEqual(inline("see https://a.org/x."), ["see ", { mark: "link", href: "https://a.org/x", kids: ["https://a.org/x"] }, "."]);
  assert.deepEqual(inline("[https://a.org](https://b.org)"), [{ mark: "link", href: "https://b.org/", kids: ["https://a.org"] }]);
  assert.deepEqual(inline("[a [b](https://b.org) c](https://c.org)").filter((node) => node.mark === "link").length, 1);
});

test("an image is shown as a link, so that nothing is fetched", () => {
  assert.deepEqual(inline("![alt](https://a.org/i.png)"), [{ mark: "link", href: "https://a.org/i.png", kids: ["alt"] }]);
});

test("while a text is written, what is unclosed at its end is read as it will be", () => {
  assert.deepEqual(inline("a **bo", true), ["a ", { mark: "strong", kids: ["bo"] }]);
  assert.deepEqual(inline("a **bold*", true), ["a ", { mark: "strong", kids: ["bold"] }]);
  assert.deepEqual(inline("a **", true), ["a "]);
  assert.deepEqual(inline("a `co", true), ["a ", { mark: "code", text: "co" }]);
  assert.deepEqual(inline("a [text](https://exa", true), ["a text"]);
  assert.deepEqual(types("| a | b", true), ["table"]);
  assert.deepEqual(types("| a | b |\n|--", true), ["table"]);
});

const PIECES = ["a", " b", "\n", "\n\n", "- ", "1. ", "12. ", "# ", "```", "```py\n", "| x | y |\n", "|---|---|\n", "|", "> ", "**", "*", "_", "`", "[l](https://a.org)", "[", "](", "    ", "  ", "---", "~~", "\\", "-", "5"];

/** A small generator with a seed, so that a failure can be repeated. */
function dice(seed) {
  return (sides) => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return Math.floor((seed / 2 ** 32) * sides);
  };
}

test("a text read as it grows has the same blocks as the text read whole, at every length", () => {
  for (let seed = 1; seed <= 400; seed += 1) {
    const roll = dice(seed);
    const growing = new Markdown();
    let text = "";
    for (let piece = 0; piece < 40; piece += 1) {
      text += PIECES[roll(PIECES.length)];
      const strip = (blocks) => JSON.stringify(blocks.map(({ at, ...block }) => block));
      assert.equal(strip(growing.update(text, true)), strip(parse(text, true)), `seed ${seed}: ${JSON.stringify(text)}`);
    }
  }
});

test("a text that was replaced is read anew", () => {
  const growing = new Markdown();
  growing.update("one\n\ntwo\n\nthree", true);
  assert.deepEqual(growing.update("other", false).map((block) => plain(block.inline)), ["other"]);
});

test("no word is lost, whatever the marks around it", () => {
  for (let seed = 1; seed <= 300; seed += 1) {
    const roll = dice(seed);
    let text = "";
    for (let at = 0; at < 30; at += 1) text += roll(2) ? PIECES[roll(PIECES.length)] : `w${at} `;
    const shown = JSON.stringify(parse(text));
    for (const [word] of text.matchAll(/w\d+/g)) assert.ok(shown.includes(word), `seed ${seed}: ${word} of ${JSON.stringify(text)}`);
  }
});

test("hostile texts cost about their length", () => {
  const size = 60_000;
  for (const piece of ["*", "[", "](", "`", "``` ", "**a ", "_a_ ", "> ", "- ", "|", "[a](", "\\", "#", "1. ", "<br", "&", "~~a", "a`b``c```", "https://", "* a\n", "| a |\n", "> a\n"]) {
    parse(piece.repeat(size / piece.length), true); // the runner's deadline is the judge
  }
});
