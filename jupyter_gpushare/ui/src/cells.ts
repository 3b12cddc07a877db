/**
 * One line below a running cell while its GPU comes back.  It is on the page only, never in the
 * notebook's file, and disappears when the cell ends or the GPU is back.
 */

import { Cell } from '@jupyterlab/cells';
import { Notebook, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';

import { phaseOf } from './state';
import { Running } from './running';
import type { IPlace } from './sight';
import type { IGpuModel } from './tokens';
import { wakingSteps } from './messages';

/** A resume shows the line only after this time. */
const AFTER_MS = 2000;
/** Kernel states after which running cells never report their end. */
const ENDING: ReadonlySet<string> = new Set(['restarting', 'autorestarting', 'terminating', 'dead']);

export class CellLines {
  constructor(
    private readonly _gpu: IGpuModel,
  ) {
    NotebookActions.executionScheduled.connect((_, { notebook, cell }) => {
      this._running.add(cell, notebook);
      this._follow();
    });
    NotebookActions.executed.connect((_, { cell }) => {
      this._running.delete(cell);
      this._follow();
    });
    _gpu.model.changed.connect(() => this._follow());
  }

  /** Forgets the cells of a kernel that ends, because JupyterLab emits no signal for them. */
  watch({ content, sessionContext }: NotebookPanel): void {
    const forget = (): void => {
      this._running.forget(content);
      this._follow();
    };
    sessionContext.kernelChanged.connect(forget);
    sessionContext.statusChanged.connect((_, status) => ENDING.has(status) && forget());
  }

  private _follow(): void {
    clearTimeout(this._timer);
    const { lease, wakingSince: since } = this._gpu.model;
    const waking = since !== null && lease !== null && phaseOf(lease) === 'waking' && this._gpu.options().banner;
    const shown = new Set<Cell>();
    const first = waking ? this._running.first() : [];
    if (waking && first.length > 0) {
      const passed_ms = Date.now() - since;
      if (passed_ms >= AFTER_MS) {
        for (const cell of first) {
          this._show(cell, wakingSteps(lease, passed_ms / 1000));
          shown.add(cell);
        }
      }
      this._timer = setTimeout(() => this._follow(), Math.max(AFTER_MS - passed_ms, 1000));
    }
    for (const [cell, { place, line }] of this._lines) {
      if (!shown.has(cell)) {
        place.dispose();
        line.remove();
        this._lines.delete(cell);
      }
    }
  }

  private _show(cell: Cell, text: string): void {
    let line = this._lines.get(cell)?.line;
    if (line === undefined) {
      line = document.createElement('div');
      line.className = 'gpushare-cell-line';
      line.setAttribute('role', 'status');
      cell.node.appendChild(line);
      this._lines.set(cell, { line, place: this._gpu.steps.add('cell', line, () => true) });
    }
    line.textContent = text;
  }

  private readonly _running = new Running<Cell, Notebook>();
  private readonly _lines = new Map<Cell, { readonly line: HTMLElement; readonly place: IPlace }>();
  private _timer: ReturnType<typeof setTimeout> | undefined;
}
