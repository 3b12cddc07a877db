import { describe, expect, it } from 'vitest';

import { Running } from '../src/running';

describe('Running', () => {
  const [a, b, c] = ['a', 'b', 'c'].map(name => ({ name, isDisposed: false })) as [ICell, ICell, ICell];
  interface ICell {
    name: string;
    isDisposed: boolean;
  }

  function running(): Running<ICell, string> {
    const running = new Running<ICell, string>();
    running.add(a, 'one');
    running.add(b, 'one');
    running.add(c, 'two');
    return running;
  }

  it('has the first cell of each notebook, in the order in which they were run', () => {
    const cells = running();
    expect(cells.first()).toEqual([a, c]);
    cells.delete(a);
    expect(cells.first()).toEqual([b, c]);
  });

  it('has a cell that is run once more behind the others', () => {
    const cells = running();
    cells.add(a, 'one');
    expect(cells.first()).toEqual([b, c]);
  });

  it('forgets all cells of a notebook whose kernel restarts, and only those', () => {
    const cells = running();
    cells.forget('one');
    expect(cells.first()).toEqual([c]);
  });

  it('forgets a cell that was deleted', () => {
    const cells = running();
    const gone = { name: 'd', isDisposed: true };
    cells.add(gone, 'three');
    expect(cells.first()).toEqual([a, c]);
  });
});
