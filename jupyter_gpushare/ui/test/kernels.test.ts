import { describe, expect, it } from 'vitest';

import { byKernel } from '../src/kernels';
import { IProcessUse } from '../src/wire';

function process(pid: number, kernel_id: string, used_bytes: number): IProcessUse {
  return { pid, name: 'python', kernel: kernel_id && `${kernel_id}.ipynb`, kernel_id, used_bytes };
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

  it('is told of each process that belongs to no kernel', () => {
    expect(byKernel([process(1, '', 1), process(2, '', 2)]).map(({ pid }) => pid)).toEqual([2, 1]);
    expect(byKernel([])).toEqual([]);
  });
});
