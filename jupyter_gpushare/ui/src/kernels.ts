/** Which kernels have how much GPU memory. */

import type { IProcessUse } from './wire';

/** Returns one process for each kernel, with the memory of all of them, and those of none; the largest first. */
export function byKernel(processes: readonly IProcessUse[]): IProcessUse[] {
  const found = new Map<string, IProcessUse>();
  for (const process of processes) {
    const key = process.kernel_id || String(process.pid);
    const first = found.get(key);
    const used_bytes = process.used_bytes + (first?.used_bytes ?? 0);
    found.set(key, { ...(first ?? process), used_bytes });
  }
  return [...found.values()].sort((a, b) => b.used_bytes - a.used_bytes);
}
