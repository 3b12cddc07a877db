import type { TranslationBundle } from '@jupyterlab/translation';
import { beforeEach, describe, expect, it, vi } from 'vitest';

import { isoText } from '../src/locale';
import { messageOf } from '../src/requests';
import { setTranslations, translated } from '../src/translate';
import { ANSWERS, JOBS, OFFERS, TIMELINE } from './answers';
import type { IText } from '../src/wire';
import { trans } from './trans';

/** A language that capitalizes words and keeps the positions of arguments. */
const LOUD = {
  __: (text: string, ...args: string[]) => trans.__(text.toUpperCase(), ...args),
  _n: (one: string, many: string, n: number) => trans._n(one.toUpperCase(), many.toUpperCase(), n)
} as unknown as TranslationBundle;

const inMemory = (gb: string): IText => ({ key: 'size.memory', args: [{ key: 'memory', args: [gb] }] });

describe('translated', () => {
  beforeEach(() => setTranslations(LOUD));

  it('says in English what the broker says in English', () => {
    setTranslations(trans);
    for (const answer of [...Object.values(ANSWERS), JOBS, OFFERS]) {
      const here = JSON.stringify(answer).replace('since 14:20', `since ${isoText('2031-05-06T14:20Z')}`);
      expect(translated(answer)).toEqual(JSON.parse(here));
    }
  });

  it('translates sentences, badges and reasons, and what is inside them', () => {
    const [lease] = translated(ANSWERS.warned).leases;
    expect(lease!.badge).toBe('LENT IN 5 MIN');
    expect(lease!.sentence).toBe(
      "IDLE FOR 10 MIN AND 2 JOBS ARE WAITING. IN 5 MIN YOUR GPU MEMORY (6.8 GIB) MOVES TO THIS MACHINE'S RAM " +
        'AND THE GPU IS LENT. YOUR VARIABLES STAY.'
    );
    expect(translated(JOBS).map(job => job.reason)).toContain(
      'NUMBER 3. NEEDS 2 GPUS TOGETHER; 1.25 ARE FREE.'
    );
    expect(translated(OFFERS).job!.sentence).toContain('WITH 1 GPU IT WOULD START NOW.');
  });

  it("writes a time in the reader's zone, with seconds where it has them", () => {
    vi.useFakeTimers({ now: new Date(2031, 4, 6, 15, 0), toFake: ['Date'] });
    const today = new Date(2031, 4, 6, 14, 20, 7).toISOString().replace('.000', '');
    const said = (time: string) => {
      const told = { key: 'session.kept', args: [{ key: 'time', args: [time] }] };
      return translated({ sentence: '', sentence_texts: [told] }).sentence;
    };
    expect(said(today)).toMatch(/^YOU KEEP IT UNTIL (14|2):20:07( PM)?\.$/);
    expect(said(today.replace(':07Z', 'Z'))).toMatch(/^YOU KEEP IT UNTIL (14|2):20( PM)?\.$/);
    expect(said('2030-05-06T12:20Z')).toContain('2030');
    vi.useRealTimers();
  });

  it('translates the timeline: decisions, the project that took a GPU back, sizes', () => {
    expect(translated(TIMELINE).moments.map(moment => moment.sentence)).toEqual([
      'SUBMITTED.',
      'YOUR JOB night (1 GPU) STARTS: THE GPUS THAT IT NEEDS ARE FREE.',
      'ITS COMMAND STARTED.',
      'YOUR JOB night (1 GPU) IS PAUSED FOR A TRAINING JOB OF PROJECT nlp: ' +
        'ANOTHER PROJECT TOOK BACK ITS GUARANTEED GPU.',
      'YOUR JOB night (1 GPU) GOES ON: THERE IS FREE CAPACITY AGAIN.'
    ]);
    const job = {
      size: '2 GPUs',
      size_texts: [{ key: 'size.gpus', args: ['2'] }],
      reason: '',
      reason_texts: [
        { key: 'job.paused', args: ['14:31', { key: 'because.over_quota_of', args: ['nlp'] }] }
      ]
    };
    expect(translated(job).size).toBe('2 GPUS');
    expect(translated(job).reason).toBe(
      'PAUSED AT 14:31 BECAUSE nlp TOOK BACK ITS GUARANTEED GPU. NOTHING WAS LOST.'
    );
  });

  it('translates the log of decisions and the sizes of leases', () => {
    const decision = { sentence: 'old', sentence_texts: TIMELINE.moments[1]!.sentence_texts };
    const status = { ...ANSWERS.active, events: [decision] };
    expect(translated(status).events[0]!.sentence).toContain('STARTS: THE GPUS THAT IT NEEDS ARE FREE.');
    const lease = { size: '20 GiB of a GPU', size_texts: [inMemory('20')] };
    expect(translated(lease).size).toBe('20 GIB OF A GPU');
  });

  it('translates refusals, which have their English template for a key', () => {
    const refused = {
      status: 404,
      reason: 'not_found',
      message: "there is no file 'a.py' on this server",
      message_texts: [{ key: 'there is no file %1 on this server', args: ["'a.py'"] }]
    };
    setTranslations(trans);
    expect(messageOf(JSON.stringify(refused))).toBe("There is no file 'a.py' on this server.");
    setTranslations(LOUD);
    expect(messageOf(JSON.stringify(refused))).toBe("THERE IS NO FILE 'a.py' ON THIS SERVER.");
    const own = { ...refused, message: 'constructor', message_texts: [{ key: 'constructor', args: [] }] };
    expect(messageOf(JSON.stringify(own))).toBe('constructor.');
    expect(messageOf('<html>')).toBeUndefined();
  });

  it('leaves the English text where a newer broker sends a key that this page lacks', () => {
    const newer = { sentence: 'New.', sentence_texts: [{ key: 'session.unknown', args: [] }] };
    expect(translated(newer).sentence).toBe('New.');
    const inside = { key: 'session.active', args: [{ key: 'part.unknown', args: [] }] };
    expect(translated({ sentence: 'Old.', sentence_texts: [inside] }).sentence).toBe('Old.');
  });

  it('leaves alone what only looks like a sentence', () => {
    const form = { parameters: { a: '1', a_texts: 'x' }, empty: null };
    expect(translated(form)).toEqual(form);
  });
});
