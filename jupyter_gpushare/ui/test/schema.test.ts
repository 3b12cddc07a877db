/** The settings in `schema/` agree with the plugins, and are defined nowhere else. */

import ts from 'typescript';
import { describe, expect, it } from 'vitest';

import jobs from '../schema/jobs.json';
import model from '../schema/model.json';
import panel from '../schema/panel.json';

const SOURCES = ts.sys
  .readDirectory(new URL('../src', import.meta.url).pathname)
  .map(path => ts.sys.readFile(path)!)
  .join('\n');

/** Every `"command"` in a schema, at any depth. */
function commandsOf(schema: unknown): string[] {
  return Array.from(JSON.stringify(schema).matchAll(/"command":"([^"]+)"/g), match => match[1]!);
}

describe('the schema', () => {
  it('names plugins and commands that exist', () => {
    for (const name of ['jobs', 'model', 'panel']) {
      expect(SOURCES).toContain(`'jupyter-gpushare:${name}'`);
    }
    const known = Array.from(SOURCES.matchAll(/export const \w+ = '(gpushare:\w+)'/g), match => match[1]);
    const used = [jobs, panel].flatMap(commandsOf);
    expect(used.length).toBe(6);
    expect(used.filter(command => !known.includes(command))).toEqual([]);
  });

  it('is where toolbar, menus and context menu are declared', () => {
    expect(Object.keys(jobs['jupyter.lab.toolbars'])).toEqual(['Notebook']);
    expect(jobs['jupyter.lab.menus'].main.map(menu => menu.id)).toEqual([
      'jp-mainmenu-run',
      'jp-mainmenu-view',
      'jp-mainmenu-file'
    ]);
    expect(jobs['jupyter.lab.menus'].context.length).toBe(1);
    expect(SOURCES).not.toMatch(/IMainMenu|contextMenu|IToolbarWidgetRegistry|toolbar\.(add|insert)/);
  });

  it('says of every setting what it does, and is read', () => {
    for (const [name, setting] of Object.entries(model.properties)) {
      expect(setting.title && setting.description).toBeTruthy();
      expect(SOURCES).toContain(name);
    }
  });
});
