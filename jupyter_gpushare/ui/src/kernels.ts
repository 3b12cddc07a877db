/** The GPU memory of each kernel. */


import type { IProcessUse } from './wire';
import { trans } from './translate';

/** Returns the name of a process's notebook, or else of the process, even if it has ended. */
export function owner(process: IProcessUse): string {
  const name = process.kernel || process.name;
  return process.keeps ? trans.__('%1 (ended)', name) : name;
}

/**
 * Returns one entry for each kernel with the memory of its processes, and the processes of no kernel,
 * largest first.  Processes that keep memory of ended kernels are one entry together.
 */
export function byKernel(processes: readonly IProcessUse[]): IProcessUse[] {
  const entries = new Map<string, IProcessUse>();
  for (const process of processes) {
    const key = process.keeps ? 'left' : process.kernel_id || String(process.pid);
    const first = entries.get(key);
    const used_bytes = process.used_bytes + (first?.used_bytes ?? 0);
    entries.set(key, { ...(first ?? process), used_bytes });
  }
  return [...entries.values()].sort((a, b) => b.used_bytes - a.used_bytes);
}
