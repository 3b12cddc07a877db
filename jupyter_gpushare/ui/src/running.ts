/** Which cells run or wait for others of their notebook.  Knows no widget. */

import type { IDisposable } from '@lumino/disposable';

export class Running<Cell extends Pick<IDisposable, 'isDisposed'>, Notebook> {
  /** Notes a cell that was requested to run: behind all others, also when it ran before. */
  add(cell: Cell, notebook: Notebook): void {
    this._notebooks.delete(cell);
    this._notebooks.set(cell, notebook);
  }

  delete(cell: Cell): void {
    this._notebooks.delete(cell);
  }

  /** Nothing of a notebook runs any more. */
  forget(notebook: Notebook): void {
    for (const [cell, its] of this._notebooks) {
      if (its === notebook) {
        this._notebooks.delete(cell);
      }
    }
  }

  /** The first cell of each notebook: the others wait for it.  JupyterLab does not tell of deleted ones. */
  first(): Cell[] {
    const first = new Map<Notebook, Cell>();
    for (const [cell, notebook] of this._notebooks) {
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
