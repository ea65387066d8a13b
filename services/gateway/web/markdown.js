// Markdown to plain objects: the part of it that language models write. Pure: no DOM, no HTML, nothing runs.
//
// A block is {type, source, open, ...}; `open` is true for the one that is still being written: what is half there at its
// very end (an unclosed ** or a half link) is read as it will most likely become, so that the text does not flicker.
//
//   paragraph {inline}   heading {level, inline}   code {lang, text}   rule   quote {blocks}
//   list {ordered, first, items: [{type: "item", blocks}]}   table {align, head: [inline], rows: [[inline]]}
import { inline } from "./inline.js";

const NESTING_MAX = 8; // deeper quotes and lists are read as text
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const MARKER = /^( *)(?:([-*+])|(\d{1,9})[.)])(?:[ \t]+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITER_ROW = /^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)*[ \t]*:?-+:?[ \t]*\|?[ \t]*$/;
const HALF_DELIMITER_ROW = /^[|:\- \t]*$/;

const blank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;

/** The blocks of a whole text. */
export function parse(text, open = false) {
  return new Lines(text.split("\n"), open, 0).blocks();
}

/** A text that grows: only what follows the last settled block is read again. */
export class Markdown {
  #text = "";
  #from = 0; // where the first unsettled block begins
  #settled = 0; // blocks before it
  blocks = [];

  /** Takes the whole text so far. `open`: more will come. */
  update(text, open) {
    if (!text.startsWith(this.#text)) this.#from = this.#settled = 0;
    this.#text = text;
    const fresh = parse(text.slice(this.#from), open);
    this.blocks = [...this.blocks.slice(0, this.#settled), ...fresh];
    this.#settle(fresh);
    return this.blocks;
  }

  /** A block is settled once another stands after it that begins with a whole line. */
  #settle(fresh) {
    const lastLine = this.#text.lastIndexOf("\n") + 1;
    const next = fresh.findLastIndex((block) => this.#from + block.at < lastLine);
    if (next < 1) return;
    this.#from += fresh[next].at;
    this.#settled += next;
  }
}

/** A cursor over lines; each `take` method eats one block. `open` belongs to whatever reaches the last line. */
class Lines {
  constructor(lines, open, depth) {
    this.lines = lines;
    this.open = open;
    this.depth = depth;
    this.line = 0;
  }

  blocks() {
    const found = [];
    let at = 0; // characters before this line
    while (this.line < this.lines.length) {
      const first = this.line;
      if (!blank(this.lines[first])) {
        const block = this.#block();
        const source = this.lines.slice(first, this.line).join("\n");
        found.push({ ...block, at, source, open: this.#atEnd });
        at += source.length + 1;
      } else {
        at += this.lines[first].length + 1;
        this.line += 1;
      }
    }
    return found;
  }

  get #atEnd() {
    return this.open && this.line >= this.lines.length;
  }

  #block() {
    const line = this.lines[this.line];
    const fence = fenceOf(line);
    if (fence) return this.#code(fence);
    const heading = HEADING.exec(line);
    if (heading) return this.#heading(heading);
    if (RULE.test(line)) return this.#rule();
    if (this.depth < NESTING_MAX && QUOTE.test(line)) return this.#quote();
    if (this.depth < NESTING_MAX && MARKER.test(line)) return this.#list();
    if (this.#tableHere()) return this.#table();
    return this.#paragraph();
  }

  #rule() {
    this.line += 1;
    return { type: "rule" };
  }

  #heading([, marks, rest = ""]) {
    this.line += 1;
    const text = rest.trim().replace(/(?:^|[ \t])#+$/, "");
    return { type: "heading", level: marks.length, inline: inline(text, this.#atEnd) };
  }

  #code({ mark, lang, indent: shift }) {
    const text = [];
    for (this.line += 1; this.line < this.lines.length; this.line += 1) {
      const line = this.lines[this.line];
      const end = FENCE.exec(line);
      if (end && end[1][0] === mark[0] && end[1].length >= mark.length && blank(end[2])) {
        this.line += 1;
        return { type: "code", lang, text: text.join("\n") };
      }
      text.push(line.slice(Math.min(shift, indent(line))));
    }
    if (this.open && /^ {0,3}(`{1,2}|~{1,2})$/.test(text.at(-1) ?? "")) text.pop(); // half of the closing fence
    return { type: "code", lang, text: text.join("\n").replace(/\n+$/, "") };
  }

  #quote() {
    const inner = [];
    while (this.line < this.lines.length) {
      const line = this.lines[this.line];
      if (QUOTE.test(line)) inner.push(line.replace(QUOTE, ""));
      else if (!blank(line) && inner.length && !blank(inner.at(-1)) && !this.#interrupts(line)) inner.push(line);
      else break;
      this.line += 1;
    }
    return { type: "quote", blocks: new Lines(inner, this.#atEnd, this.depth + 1).blocks() };
  }

  #list() {
    const first = MARKER.exec(this.lines[this.line]);
    const ordered = first[3] !== undefined;
    const items = [];
    let marker = first;
    while (marker && (marker[3] !== undefined) === ordered && !RULE.test(this.lines[this.line])) {
      items.push(this.#item(marker));
      marker = this.#nextMarker(first[1].length);
    }
    return { type: "list", ordered, first: ordered ? Number(first[3]) : null, items };
  }

  /** The marker of the list's next item, past blank lines, or null when the list is over (the cursor then stays). */
  #nextMarker(listIndent) {
    const at = this.#nextWords();
    const marker = at < this.lines.length ? MARKER.exec(this.lines[at]) : null;
    if (!marker || marker[1].length >= listIndent + 2) return null;
    this.line = at;
    return marker;
  }

  /** The next line from here that is not blank. */
  #nextWords() {
    let at = this.line;
    while (at < this.lines.length && blank(this.lines[at])) at += 1;
    return at;
  }

  /** One item: its first line without the marker, and the lines that are indented under it or run on from its text. */
  #item(marker) {
    const base = marker[1].length;
    const first = this.line;
    const inner = [this.lines[first].slice(marker[0].length)];
    const width = Math.min(marker[0].length, base + 4);
    for (this.line += 1; this.line < this.lines.length; this.line += 1) {
      const line = this.lines[this.line];
      const depth = indent(line);
      if (blank(line)) {
        const next = this.lines[this.#nextWords()];
        if (next === undefined || indent(next) < base + 2) break;
        inner.push("");
      } else if (depth >= base + 2) inner.push(line.slice(Math.min(width, depth)));
      else if (this.lines[this.line - 1].trim() && !MARKER.test(line) && !this.#interrupts(line)) inner.push(line);
      else break;
    }
    const source = this.lines.slice(first, this.line).join("\n");
    return { type: "item", source, open: this.#atEnd, blocks: new Lines(inner, this.#atEnd, this.depth + 1).blocks() };
  }

  #tableHere() {
    const [head, next] = [this.lines[this.line], this.lines[this.line + 1]];
    if (!head.includes("|")) return false;
    if (next !== undefined && next.includes("-") && DELIMITER_ROW.test(next)) {
      return this.#soFar(next) || cells(next).length === cells(head).length;
    }
    return /^\s*\|/.test(head) && this.#soFar(next);
  }

  /** Whether this line, the last one of an open text, may yet become a delimiter row. */
  #soFar(next) {
    const last = this.line + (next === undefined ? 1 : 2) >= this.lines.length;
    return this.open && last && (next === undefined || HALF_DELIMITER_ROW.test(next));
  }

  #table() {
    const head = cells(this.lines[this.line]);
    const align = cells(this.lines[this.line + 1] ?? "").map(alignment);
    const rows = [];
    for (this.line += 2; this.line < this.lines.length; this.line += 1) {
      const line = this.lines[this.line];
      if (!line.includes("|") || this.#interrupts(line)) break;
      const row = cells(line);
      rows.push(head.map((_, at) => row[at] ?? ""));
    }
    this.line = Math.min(this.line, this.lines.length);
    const read = (text) => inline(text, this.#atEnd);
    return { type: "table", align, head: head.map(read), rows: rows.map((row) => row.map(read)) };
  }

  #paragraph() {
    const text = [this.lines[this.line].trimStart()];
    for (this.line += 1; this.line < this.lines.length; this.line += 1) {
      const line = this.lines[this.line];
      if (blank(line) || this.#interrupts(line)) break;
      text.push(line.trimStart());
    }
    return { type: "paragraph", inline: inline(text.join("\n").trimEnd(), this.#atEnd) };
  }

  /** Whether `line` begins another block although no blank line stands before it. */
  #interrupts(line) {
    if (fenceOf(line) || HEADING.test(line) || RULE.test(line)) return true;
    if (this.depth >= NESTING_MAX) return false;
    if (QUOTE.test(line)) return true;
    const marker = MARKER.exec(line);
    return marker !== null && marker[0].length < line.length && (marker[3] === undefined || Number(marker[3]) === 1);
  }
}

/** The opening of a code block, or null: after backticks no other backtick may stand in its line. */
function fenceOf(line) {
  const match = FENCE.exec(line);
  if (!match || (match[1][0] === "`" && match[2].includes("`"))) return null;
  return { mark: match[1], lang: match[2].trim().split(/\s/)[0].slice(0, 32), indent: indent(line) };
}

/** The cells of a table row; `\|` is a bar inside one. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  const barred = `|${row}`.match(/\|(?:\\.|[^|\\]|\\$)*/g);
  return barred.map((cell) => cell.slice(1).trim().replaceAll("\\|", "|"));
}

function alignment(cell) {
  if (/^:-*:$/.test(cell)) return "center";
  return cell.endsWith(":") ? "right" : null;
}
