/** Every string that people read goes through the translator, as a literal, in the project's words. */

import ts from 'typescript';
import { describe, expect, it } from 'vitest';

const SOURCES = new URL('../src', import.meta.url).pathname;
const SHOWN = new Set(['title', 'label', 'caption', 'aria-label', 'alt']);
/** Strings that are never shown: the purpose of a plugin, and the kind of a panel's widget. */
const NOT_SHOWN = new Set(['description', 'type']);
const AVOIDED = /\b(reclaim|evict|oom|pending|cull|preempt)/i;

interface IFound {
  readonly translated: string[];
  readonly bare: string[];
}

/** Checks the strings of one module. */
function stringsOf(path: string): IFound {
  const found: IFound = { translated: [], bare: [] };
  const source = ts.createSourceFile(path, ts.sys.readFile(path)!, ts.ScriptTarget.Latest, true);
  const complain = (node: ts.Node): void => {
    const { line } = source.getLineAndCharacterOfPosition(node.getStart());
    found.bare.push(`${path}:${line + 1}: ${node.getText()}`);
  };
  const visit = (node: ts.Node): void => {
    if (ts.isCallExpression(node) && /(^|\.)_?trans\.(__|_n)$/.test(node.expression.getText())) {
      const many = node.expression.getText().endsWith('_n') ? 2 : 1;
      for (const text of node.arguments.slice(0, many)) {
        ts.isStringLiteralLike(text) ? found.translated.push(text.text) : complain(text);
      }
      node.arguments.slice(many).forEach(visit);
      return;
    }
    if (ts.isJsxText(node) && /\p{L}/u.test(node.text)) {
      complain(node);
    }
    if (ts.isStringLiteralLike(node)) {
      const parent = node.parent;
      const named = ts.isJsxAttribute(parent) || ts.isPropertyAssignment(parent) ? parent.name.getText() : '';
      const isKey = ts.isPropertyAssignment(parent) && parent.name === node;
      const sentence = /^[A-Z][a-z]* [a-z]/.test(node.text) && !ts.isNewExpression(parent) && !isKey;
      if ((SHOWN.has(named) && node.text !== '') || (sentence && !NOT_SHOWN.has(named))) {
        complain(node);
      }
    }
    ts.forEachChild(node, visit);
  };
  visit(source);
  return found;
}

describe('what people read', () => {
  const all = ts.sys.readDirectory(SOURCES).map(stringsOf);

  it('goes through the translator', () => {
    expect(all.flatMap(found => found.bare)).toEqual([]);
  });

  it('is said in our words', () => {
    const texts = all.flatMap(found => found.translated);
    expect(texts.length).toBeGreaterThan(100);
    expect(texts.filter(text => AVOIDED.test(text))).toEqual([]);
  });

  it('has its moments formatted in one place', () => {
    const formats = ts.sys
      .readDirectory(SOURCES)
      .filter(path => /\.toLocale|\bIntl\./.test(ts.sys.readFile(path)!));
    expect(formats.map(path => path.replace(/^.*\//, ''))).toEqual(['locale.ts']);
  });
});
