import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { GpuModel } from '../src/model';
import { Stops, UNDO_MS } from '../src/stops';
import { IJob } from '../src/wire';
import { JOBS } from './answers';

const QUEUED: IJob = { ...JOBS[0]!, id: 'q', state: 'queued', attempt: 0, started_at: null };
const RUNNING: IJob = { ...JOBS[0]!, id: 'r', state: 'running', attempt: 1 };

function stops(confirmed = true): {
  readonly stops: Stops;
  readonly sent: string[];
  readonly asked: string[];
  readonly undo: () => void;
  readonly offered: () => number;
  readonly tell: (jobs: readonly IJob[]) => void;
} {
  const sent: string[] = [];
  const asked: string[] = [];
  let undo = (): void => undefined;
  let offered = 0;
  let follow: ((model: unknown, state: unknown) => void) | null = null;
  const gpu = { changed: { connect: (slot: typeof follow) => (follow = slot) } } as unknown as GpuModel;
  const made = new Stops(gpu, {
    send: async job => void sent.push(job.id),
    confirm: async jobs => {
      asked.push(jobs.map(({ id }) => id).join(' '));
      return confirmed;
    },
    offerUndo: (_, done) => {
      undo = done;
      offered += 1;
      return () => (offered -= 1);
    }
  });
  const tell = (jobs: readonly IJob[]): void => follow!(gpu, { kind: 'ready', status: { jobs }, lease: null });
  return { stops: made, sent, asked, undo: () => undo(), offered: () => offered, tell };
}

describe('Stops', () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  it('asks about a job that has begun, and sends the stop once', async () => {
    const site = stops();
    const first = site.stops.stop(RUNNING);
    expect(site.stops.isStopping(RUNNING)).toBe(true);
    await Promise.all([first, site.stops.stop(RUNNING)]);
    expect([site.asked, site.sent]).toEqual([['r'], ['r']]);
    expect(site.stops.isStopping(RUNNING)).toBe(false);
  });

  it('leaves a job alone whose owner thinks again', async () => {
    const site = stops(false);
    await site.stops.stop(RUNNING);
    expect(site.sent).toEqual([]);
    expect(site.stops.isStopping(RUNNING)).toBe(false);
  });

  it('holds a job that has not begun back, and can undo that', async () => {
    const site = stops();
    await site.stops.stop(QUEUED);
    expect([site.asked, site.sent, site.offered()]).toEqual([[], [], 1]);
    site.undo();
    expect([site.stops.isStopping(QUEUED), site.offered()]).toEqual([false, 0]);
    await vi.advanceTimersByTimeAsync(2 * UNDO_MS);
    expect(site.sent).toEqual([]);
    await site.stops.stop(QUEUED);
    await vi.advanceTimersByTimeAsync(UNDO_MS);
    expect([site.sent, site.offered()]).toEqual([['q'], 0]);
    site.undo();
    expect(site.sent).toEqual(['q']);
  });

  it('stops a job at once that begins before the time to undo is over', async () => {
    const site = stops();
    await site.stops.stop(QUEUED);
    site.tell([QUEUED]);
    expect(site.sent).toEqual([]);
    site.tell([{ ...QUEUED, state: 'starting', attempt: 1 }]);
    expect([site.sent, site.offered()]).toEqual([['q'], 0]);
  });

  it('asks once about several, and offers one undo for those that have not begun', async () => {
    const site = stops();
    const [second, third] = ['s', 't'].map(id => ({ ...QUEUED, id }));
    await site.stops.stop(RUNNING, QUEUED, { ...RUNNING, id: 'r2' }, second!, third!);
    expect([site.asked, site.sent, site.offered()]).toEqual([['r q r2 s t'], ['r', 'r2'], 1]);
    // One of them begins: the others can still come back.
    site.tell([{ ...QUEUED, state: 'starting', attempt: 1 }]);
    expect([site.sent, site.offered()]).toEqual([['r', 'r2', 'q'], 1]);
    site.undo();
    await vi.advanceTimersByTimeAsync(2 * UNDO_MS);
    expect([site.sent, site.offered()]).toEqual([['r', 'r2', 'q'], 0]);
    await site.stops.stop();
    expect(site.offered()).toBe(0);
  });
});
