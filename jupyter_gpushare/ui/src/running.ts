/** The cells that run or wait for others in their notebook.  No widgets here. */

import type { IDisposable } from '@lumino/disposable';

export class Running<Cell extends Pick<IDisposable, 'isDisposed'>, Notebook> {
  /** Adds a cell that was requested to run, behind all others, even if it ran before. */
  add(cell: Cell, notebook: Notebook): void {
    this._notebooks.delete(cell);
    this._notebooks.set(cell, notebook);
  }

  delete(cell: Cell): void {
    this._notebooks.delete(cell);
  }

  /** Forgets the cells of a notebook, because none runs any more. */
  forget(notebook: Notebook): void {
    for (const [cell, owner] of this._notebooks) {
      if (owner === notebook) {
        this._notebooks.delete(cell);
      }
    }
  }

  /** Returns the first cell of each notebook, for which the others wait. */
  first(): Cell[] {
    const first = new Map<Notebook, Cell>();
    for (const [cell, notebook] of this._notebooks) {
      // JupyterLab emits no signal for a deleted cell.
      if (cell.isDisposed) {
        this._notebooks.delete(cell);
      } else if (!first.has(notebook)) {
        first.set(notebook, cell);
      }
    }
    return [...first.values()];
  }

  private readonly _notebooks = new Map<Cell, Notebook>();
}
