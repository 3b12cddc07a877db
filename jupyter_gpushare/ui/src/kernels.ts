/** Which kernels have how much GPU memory. */


import type { IProcessUse } from './wire';
import { trans } from './translate';

/** Returns whose memory it is: that of a notebook or a process, also of one that has ended. */
export function owner(process: IProcessUse): string {
  const name = process.kernel || process.name;
  return process.keeps ? trans.__('%1 (ended)', name) : name;
}

/**
 * Returns one process for each kernel, with the memory of all of them, and those of none; the largest first.
 * Of those that keep what ended kernels left there is one as well.
 */
export function byKernel(processes: readonly IProcessUse[]): IProcessUse[] {
  const found = new Map<string, IProcessUse>();
  for (const process of processes) {
    const key = process.keeps ? 'left' : process.kernel_id || String(process.pid);
    const first = found.get(key);
    const used_bytes = process.used_bytes + (first?.used_bytes ?? 0);
    found.set(key, { ...(first ?? process), used_bytes });
  }
  return [...found.values()].sort((a, b) => b.used_bytes - a.used_bytes);
}
