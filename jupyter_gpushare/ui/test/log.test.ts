import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { FIRST_BYTES, IReading, keepReading, Log } from '../src/log';
import { points, Samples } from '../src/samples';
import './trans';

/** A log of one attempt that grows. */
class File {
  text = '';
  attempts = 1;
  first = 1;
  asked: [number, number][] = [];
  most = 1000;
  /** Offset of the first byte that is kept. */
  lost = 0;

  leftOut = 0;

  fails = false;

  readonly read = async (attempt: number, offset: number) => {
    this.asked.push([attempt, offset]);
    if (this.fails) {
      throw new Error('away');
    }
    const from = Math.max(this.lost, offset < 0 ? this.text.length + offset : offset);
    const text = this.text.slice(from, from + this.most);
    const { attempts, first, leftOut } = this;
    return { text, offset: from, next: from + text.length, attempts, first, leftOut, why: leftOut > 0 ? 'No space left' : '' };
  };
}

function logOf(file: File, attempt = 0): Log {
  return new Log(file.read, attempt);
}

describe('Log', () => {
  it('reads on where it was, and completes a line', async () => {
    const file = new File();
    const log = logOf(file);
    expect(await log.readNext()).toBe(false);
    file.text = 'one\ntw';
    expect(await log.readNext()).toBe(true);
    expect(log.lines).toEqual(['one', 'tw']);
    file.text += 'o\nthree\n';
    await log.readNext();
    expect(log.lines).toEqual(['one', 'two', 'three', '']);
    expect(file.asked).toEqual([
      [0, -FIRST_BYTES],
      [0, 0],
      [0, 6]
    ]);
    expect(log.isCut).toBe(false);
  });

  it('says what the disk did not take, as long as that is so', async () => {
    const file = new File();
    const log = logOf(file);
    file.leftOut = 6;
    await log.readNext();
    expect(log.lack).toBe(
      '6 bytes of this log were not written: No space left. The job keeps the last 64 KiB while it runs.'
    );
    file.leftOut = 0;
    await log.readNext();
    expect(log.lack).toBe('');
  });

  it('reads every piece once, also when asked twice at the same time', async () => {
    const file = new File();
    const log = logOf(file);
    file.text = 'one\ntwo\n';
    expect(await Promise.all([log.readNext(), log.readNext()])).toEqual([true, true]);
    expect(log.lines).toEqual(['one', 'two', '']);
    expect(await log.readNext()).toBe(false);
  });

  it('shows a bar once, however often it was drawn', async () => {
    const file = new File();
    const log = logOf(file);
    for (const text of ['\r 10%|#', '\r 20%|##', '\r 30%|###']) {
      file.text += text;
      await log.readNext();
    }
    expect(log.lines).toEqual([' 30%|###']);
  });

  it.each([
    ['a bar that ends with \\r', ['\r 10%|#\r', ' 20%|##\r', '\n']],
    ['colours cut in two', ['\r\x1b[3', '2m 10%\x1b[', '0m|#\r\x1b', '[0m 20%|##', '\n']],
    ['lines that end with \\r\\n, cut in two', ['\r 10%|#\r 20%|##\r', '\r', '\r\n']]
  ])('draws %s the same however it is cut', async (_, pieces) => {
    const file = new File();
    const log = logOf(file);
    for (const piece of pieces) {
      file.text += piece;
      await log.readNext();
    }
    expect(log.lines).toEqual([' 20%|##', '']);
  });

  it('keeps the end of a line without an end', async () => {
    const file = new File();
    file.most = 1 << 20;
    const log = logOf(file);
    for (const text of ['x'.repeat(60_000), 'y'.repeat(60_000), 'end']) {
      file.text += text;
      await log.readNext();
    }
    expect(log.lines).toEqual([`${'x'.repeat(5_533)}${'y'.repeat(60_000)}end`]);
    expect(log.isCut).toBe(true);
  });

  it('holds no more of long lines than a page can show', async () => {
    const file = new File();
    file.most = 1 << 20;
    const log = logOf(file);
    for (let n = 0; n < 60; n++) {
      file.text += `${'x'.repeat(100_000)} ${n}\n`;
      await log.readNext();
    }
    expect(log.lines.join('').length).toBeLessThan(5e6);
    expect(log.lines.slice(-2)).toEqual([`${'x'.repeat(100_000)} 59`, '']);
    expect(log.isCut).toBe(true);
  });

  it('begins near the end of a long one, and says so', async () => {
    const file = new File();
    file.text = 'x\n'.repeat(FIRST_BYTES);
    file.most = 10 * FIRST_BYTES;
    const log = logOf(file);
    await log.readNext();
    expect(log.isCut).toBe(true);
    expect(log.lines.length).toBeLessThanOrEqual(10_000);
  });

  it('says where a part of it was not kept', async () => {
    const file = new File();
    const log = logOf(file);
    file.text = 'one\ntw';
    await log.readNext();
    file.text += 'o\nthree\nfour\n';
    file.lost = 8;
    await log.readNext();
    expect(log.lines).toEqual(['one', 'tw', '[2 bytes of this log were not kept]', 'three', 'four', '']);
    expect(log.isCut).toBe(false);
    file.text += 'five\n';
    await log.readNext();
    expect(log.lines.slice(-2)).toEqual(['five', '']);
  });

  it('begins anew with a new attempt, unless an old one is looked at', async () => {
    const file = new File();
    file.text = 'first';
    const [newest, fixed] = [logOf(file), logOf(file, 1)];
    await newest.readNext();
    await fixed.readNext();
    file.text = 'second';
    file.attempts = 2;
    await newest.readNext();
    await newest.readNext();
    expect(newest.lines).toEqual(['second']);
    await fixed.readNext();
    expect(fixed.kept).toEqual([1, 2]);
    expect(fixed.lines[0]).toMatch(/^first/);
  });

  it('is not cut where only that of the attempt before was', async () => {
    const file = new File();
    file.text = 'x\n'.repeat(FIRST_BYTES);
    file.most = 10 * FIRST_BYTES;
    const log = logOf(file);
    await log.readNext();
    file.text = 'second';
    file.attempts = 2;
    await log.readNext();
    await log.readNext();
    expect(log.lines).toEqual(['second']);
    expect(log.isCut).toBe(false);
  });

  it('knows which attempts have a log, once it was read', async () => {
    const file = new File();
    file.attempts = 5;
    file.first = 3;
    const log = logOf(file);
    expect(log.kept).toBeNull();
    await log.readNext();
    expect(log.kept).toEqual([3, 4, 5]);
    file.attempts = file.first = 0;
    const gone = logOf(file);
    await gone.readNext();
    expect(gone.kept).toEqual([]);
  });

  it('finds lines, whatever their case', async () => {
    const file = new File();
    file.text = 'Loss 1\nacc 2\nloss 3';
    const log = logOf(file);
    await log.readNext();
    expect(log.find('LOSS')).toEqual([0, 2]);
    expect(log.find('')).toEqual([]);
  });
});

describe('keepReading', () => {
  beforeEach(() => {
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.clearAllTimers();
    vi.useRealTimers();
  });

  /** Reads a file; `after` returns the number of its requests in this many seconds. */
  function begin(file: File, change: Partial<IReading> = {}) {
    const before = file.asked.length;
    const stop = keepReading(logOf(file), {
      isSeen: () => true,
      grows: true,
      onRead: () => undefined,
      ...change
    });
    let counted = before;
    const after = async (seconds: number): Promise<number> => {
      await vi.advanceTimersByTimeAsync(1000 * seconds);
      const asked = file.asked.length - counted;
      counted += asked;
      return asked;
    };
    return { after, stop };
  }

  it('asks once a second, however often the job prints, until it is stopped', async () => {
    const file = new File();
    setInterval(() => (file.text += 'x\n'), 10);
    const { after, stop } = begin(file);
    expect(await after(59.5)).toBe(60);
    stop();
    expect(await after(60)).toBe(0);
  });

  it('asks again at once while pieces are full', async () => {
    const file = new File();
    file.most = FIRST_BYTES;
    const { after } = begin(file);
    expect(await after(0.5)).toBe(1);
    file.text = 'x'.repeat(FIRST_BYTES * 3 + 1);
    expect(await after(1)).toBe(4);
    expect(await after(5)).toBe(5);
  });

  it('asks for a new attempt at once', async () => {
    const file = new File();
    file.text = 'first\n';
    const { after } = begin(file);
    expect(await after(0.5)).toBe(1);
    file.attempts = 2;
    expect(await after(1)).toBe(2);
  });

  it('asks less and less often while that fails, until it does not', async () => {
    const file = new File();
    const refusals: string[] = [];
    file.fails = true;
    const { after } = begin(file, { onRead: (_, refusal) => void refusals.push(refusal) });
    expect(await after(1)).toBe(1);
    for (const seconds of [2, 4, 8, 16, 32, 60, 60]) {
      expect(await after(seconds)).toBe(1);
    }
    file.fails = false;
    expect(await after(60)).toBe(2);
    expect(await after(60)).toBe(60);
    expect([...new Set(refusals)]).toEqual(['away', '']);
  });

  it('asks nothing while nobody looks', async () => {
    const file = new File();
    let seen = false;
    const { after } = begin(file, { isSeen: () => seen });
    expect(await after(60.5)).toBe(0);
    seen = true;
    expect(await after(1)).toBe(1);
    seen = false;
    expect(await after(60)).toBe(0);
  });

  it('ends with the last line of a job that has ended', async () => {
    const file = new File();
    file.text = 'last\n';
    expect(await begin(file, { grows: false }).after(60)).toBe(2);
    file.fails = true;
    const { after } = begin(file, { grows: false });
    expect(await after(1)).toBe(1);
    file.fails = false;
    expect(await after(60)).toBe(2);
  });
});

describe('Samples', () => {
  it('are bounded in time and in number', () => {
    const samples = new Samples();
    for (let at = 0; at < 1_000_000; at += 100) {
      samples.add({ at, percent: 1 });
    }
    expect(samples.all.length).toBeLessThanOrEqual(330);
    expect(samples.all.length).toBeGreaterThan(250);
    expect(samples.all[0]!.at).toBeGreaterThanOrEqual(400_000 - 100);
  });

  it('are drawn from the right edge to the left', () => {
    const samples = [0, 50, 100].map((percent, n) => ({ at: 300_000 * n, percent }));
    expect(points(samples, 240, 36)).toBe('0.0,36.0 120.0,18.0 240.0,0.0');
  });
});
