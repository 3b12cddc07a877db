/** The golden messages of `tests/wire`, as answers of the server. */

import history from '../../../tests/wire/golden/history.json';
import job from '../../../tests/wire/golden/job.json';
import jobList from '../../../tests/wire/golden/job_list.json';
import offers from '../../../tests/wire/golden/offers.json';
import active from '../../../tests/wire/golden/status_active.json';
import asleep from '../../../tests/wire/golden/status_asleep.json';
import empty from '../../../tests/wire/golden/status_empty.json';
import lost from '../../../tests/wire/golden/status_lost.json';
import waking from '../../../tests/wire/golden/status_waking.json';
import warned from '../../../tests/wire/golden/status_warned.json';
import timeline from '../../../tests/wire/golden/timeline.json';
import { IHistory, IJob, IJobList, IJobTimeline, IOffers } from '../src/wire';
import { StatusAnswer } from '../src/state';

export type Ready = Extract<StatusAnswer, { unreachable_since: null }>;

function ready(plain: unknown): Ready {
  return { ...(plain as Ready), enabled: true, server: '', unreachable_since: null };
}

export const ANSWERS = {
  active: ready(active),
  warned: ready(warned),
  asleep: ready(asleep),
  waking: ready(waking),
  lost: ready(lost),
  empty: ready(empty)
};

export const NO_ANSWER: StatusAnswer = {
  enabled: true,
  server: '',
  unreachable_since: '2031-05-06T14:02:00Z',
  message: 'the GPU broker does not answer'
};

export const HISTORY: IHistory = history;
export const JOB = job as unknown as IJob;
export const JOBS = (jobList as unknown as IJobList).jobs;
export const TIMELINE = timeline as unknown as IJobTimeline;
export const OFFERS = offers as unknown as IOffers;
