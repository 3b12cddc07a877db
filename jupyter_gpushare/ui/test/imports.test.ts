import ts from 'typescript';
import { describe, expect, it } from 'vitest';

const SOURCES = new URL('../src/', import.meta.url).pathname;

/** Files of `src` that each file imports, for values and for types, also on demand. */
function importsOf(): Map<string, string[]> {
  const files = ts.sys.readDirectory(SOURCES, ['.ts', '.tsx']);
  const names = new Map(files.map(path => [path.slice(SOURCES.length).replace(/\.tsx?$/, ''), path]));
  return new Map(
    Array.from(names, ([name, path]) => {
      const { importedFiles } = ts.preProcessFile(ts.sys.readFile(path)!);
      const inside = importedFiles.map(file => file.fileName).filter(file => file.startsWith('./'));
      return [name, inside.map(file => file.slice(2)).filter(file => names.has(file))];
    })
  );
}

/** Returns a circle of imports, or an empty list. */
function circle(imports: Map<string, string[]>, name: string, path: string[], done: Set<string>): string[] {
  if (path.includes(name)) {
    return [...path.slice(path.indexOf(name)), name];
  }
  if (done.has(name)) {
    return [];
  }
  for (const next of imports.get(name) ?? []) {
    const found = circle(imports, next, [...path, name], done);
    if (found.length > 0) {
      return found;
    }
  }
  done.add(name);
  return [];
}

describe('imports', () => {
  it('form no circle', () => {
    const imports = importsOf();
    expect(imports.get('index')).toContain('model');
    const done = new Set<string>();
    expect([...imports.keys()].flatMap(name => circle(imports, name, [], done))).toEqual([]);
  });

  it('are found when they form one', () => {
    const imports = new Map([['a', ['b']], ['b', ['c']], ['c', ['a']]]);
    expect(circle(imports, 'a', [], new Set())).toEqual(['a', 'b', 'c', 'a']);
  });
});
