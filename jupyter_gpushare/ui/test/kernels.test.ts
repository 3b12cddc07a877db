import { describe, expect, it } from 'vitest';

import { byKernel, owner } from '../src/kernels';
import { IProcessUse } from '../src/wire';
import './trans';

function process(pid: number, kernel_id: string, used_bytes: number, keeps = false): IProcessUse {
  return { pid, name: 'python', kernel: kernel_id && `${kernel_id}.ipynb`, kernel_id, used_bytes, keeps };
}

describe('GPU memory', () => {
  it('is told of each kernel once, with that of all its processes, the largest first', () => {
    const processes = [process(1, 'a', 10), process(2, '', 25), process(3, 'b', 30), process(4, 'a', 30)];
    expect(byKernel(processes).map(({ kernel, pid, used_bytes }) => [kernel, pid, used_bytes])).toEqual([
      ['a.ipynb', 1, 40],
      ['b.ipynb', 3, 30],
      ['', 2, 25]
    ]);
  });

  it('that an ended kernel left is told once, apart from that of the same kernel since its restart', () => {
    const left = [process(1, 'a', 40, true), process(2, 'a', 0, true), process(3, '', 0, true)];
    const shown = byKernel([process(4, 'a', 10), ...left]);
    expect(shown.map(each => [owner(each), each.keeps, each.used_bytes])).toEqual([
      ['a.ipynb (ended)', true, 40],
      ['a.ipynb', false, 10]
    ]);
    expect(byKernel([process(5, '', 7, true)]).map(each => owner(each))).toEqual(['python (ended)']);
  });

  it('is told of each process that belongs to no kernel', () => {
    expect(byKernel([process(1, '', 1), process(2, '', 2)]).map(({ pid }) => pid)).toEqual([2, 1]);
    expect(byKernel([])).toEqual([]);
  });
});
