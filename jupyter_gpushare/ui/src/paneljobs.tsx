/** My training jobs in the sidebar: five of them, and a link to all. */

import React from 'react';

import { Meter } from './meter';
import { ENDED } from './state';
import { IJob } from './wire';
import { duration, jobBadge, oneLine, progressText } from './messages';
import { trans } from './translate';

const SHOWN_JOBS = 5;

export interface IJobLinks {
  readonly open: (job?: string) => void;
  readonly submit: () => void;
}

export function Jobs(props: {
  jobs: readonly IJob[];
  /** False if the list of jobs shows the reasons. */
  hasReasons: boolean;
  links: IJobLinks | null;
}): JSX.Element {
  const { jobs, hasReasons, links } = props;
  const first = [...jobs].sort((a, b) => Number(ENDED.has(a.state)) - Number(ENDED.has(b.state)));
  return (
    <section>
      <h3>{trans.__('My training jobs')}</h3>
      {jobs.length === 0 && <p className="gpushare-muted">{trans.__('None.')}</p>}
      <ul>
        {first.slice(0, SHOWN_JOBS).map(job => (
          <Job key={job.id} job={job} hasReason={hasReasons} links={links} />
        ))}
      </ul>
      {links !== null && (
        <div className="gpushare-row">
          <button type="button" className="gpushare-link" onClick={links.submit}>
            {trans.__('Run as training job')}
          </button>
          {jobs.length > 0 && (
            <button type="button" className="gpushare-link" onClick={() => links.open()}>
              {trans.__('All jobs')}
            </button>
          )}
        </div>
      )}
    </section>
  );
}

function Job(props: {
  job: IJob;
  hasReason: boolean;
  links: IJobLinks | null;
}): JSX.Element {
  const { job, links } = props;
  return (
    <li className="gpushare-job">
      <div className="gpushare-row">
        {links === null ? (
          <b className="gpushare-name">{job.name}</b>
        ) : (
          <button
            type="button"
            className="gpushare-link gpushare-name"
            title={job.id}
            onClick={() => links.open(job.id)}
          >
            {job.name}
          </button>
        )}
        <span className="gpushare-state" data-state={job.state}>
          {jobBadge(job)}
        </span>
      </div>
      {props.hasReason && (
        <div className="gpushare-muted" title={job.reason}>
          {oneLine(job.reason)}
        </div>
      )}
      <div className="gpushare-muted">
        {job.started_at === null
          ? trans.__('%1, waited %2', job.size, duration(job.waited_s))
          : trans.__(
              '%1, waited %2, ran %3',
              job.size,
              duration(job.waited_s),
              duration(job.ran_s)
            )}
      </div>
      {job.done !== null && job.total !== null && job.total > 0 ? (
        <Meter
          label={trans.__('Progress of %1', job.name)}
          text={progressText(job)}
          max={job.total}
          parts={[{ value: job.done, kind: 'used' }]}
        />
      ) : (
        job.done !== null && <div className="gpushare-muted">{progressText(job)}</div>
      )}
    </li>
  );
}
