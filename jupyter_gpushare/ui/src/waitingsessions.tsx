/** The user's servers that wait for a GPU on the spawn page; shown in the sidebar and above the jobs. */

import React from 'react';

import { IWaitingSession } from './wire';
import { oneLine } from './messages';
import { trans } from './translate';

export function WaitingSessions(props: {
  sessions: readonly IWaitingSession[];
  /** False if the list of jobs shows the reasons. */
  hasReasons: boolean;
}): JSX.Element | null {
  const { sessions } = props;
  if (sessions.length === 0) {
    return null;
  }
  return (
    <section className="gpushare-waiting" aria-label={trans.__('My sessions that wait')}>
      <h3>{trans.__('My sessions that wait')}</h3>
      <ul>
        {sessions.map(session => (
          <li key={session.server} className="gpushare-job">
            <div className="gpushare-row">
              <b className="gpushare-name">{session.server || trans.__('Default server')}</b>
              <span className="gpushare-state" data-state="queued">
                {trans.__('Queued, number %1', session.position)}
              </span>
            </div>
            {props.hasReasons && <div className="gpushare-muted">{oneLine(session.sentence)}</div>}
            <div className="gpushare-muted">{trans.__('%1, project %2', session.size, session.project)}</div>
          </li>
        ))}
      </ul>
    </section>
  );
}
