/** The dialog that changes a job in the queue: size, project, priority, maximum run time. */

import React from 'react';

import { changeOf } from './jobchange';
import { fieldsOf, LaunchModel } from './launch';
import { IPartProps, MaxRun, Project, showLaunchDialog, Size, Verdict } from './launchdialog';
import { IJob, IJobChange, ILaunchForm } from './wire';
import { trans } from './translate';

/** Shows the dialog; returns the changed job, or null when it was closed. */
export function showEditDialog(
  job: IJob,
  options: Pick<LaunchModel.IOptions, 'offers' | 'projects' | 'isHidden'>,
  send: (change: IJobChange) => Promise<IJob>
): Promise<IJob | null> {
  // Its file is not read: only what follows can be changed.
  const form: ILaunchForm = {
    path: job.source?.path ?? '',
    kind: 'command',
    cwd: '',
    kernel: '',
    environments: [],
    parameters: {}
  };
  const model = new LaunchModel({
    ...options,
    fields: fieldsOf(job),
    launchForm: () => Promise.resolve(form),
    launch: request => send(changeOf(job, request))
  });
  return showLaunchDialog(model, {
    title: trans.__('Change %1', job.name),
    ok: trans.__('Change'),
    form: Form
  });
}

function Form(props: IPartProps): JSX.Element {
  return (
    <>
      <Size {...props} />
      <Project {...props} />
      <Priority {...props} />
      <MaxRun {...props} />
      <Verdict {...props} outlook={false} />
    </>
  );
}

function Priority({ model }: IPartProps): JSX.Element {
  // As typed: a sign alone is no number yet.
  const [text, setText] = React.useState(String(model.fields.priority));
  const problem = model.problems.priority;
  const id = 'gpushare-launch-priority';
  return (
    <div className="gpushare-field">
      <label htmlFor={id}>{trans.__('Priority in its project')}</label>
      <input
        type="text"
        inputMode="numeric"
        className="jp-mod-styled"
        id={id}
        value={text}
        aria-invalid={problem !== undefined}
        aria-describedby={problem !== undefined ? `${id}-problem` : `${id}-hint`}
        onChange={({ target: { value } }) => {
          setText(value);
          model.set({ priority: /^\s*-?\d+\s*$/.test(value) ? Number(value) : NaN });
        }}
      />
      {problem !== undefined && (
        <span className="gpushare-problem" id={`${id}-problem`}>
          {problem}
        </span>
      )}
      <span className="gpushare-muted" id={`${id}-hint`}>
        {trans.__('Higher comes first; above 0 as far as its project has the right.')}
      </span>
    </div>
  );
}
