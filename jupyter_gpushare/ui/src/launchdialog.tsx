/** Dialogs with fields: for a new job, with the live line above the button, and for a job in the queue. */

import { Dialog } from '@jupyterlab/apputils';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import { ISignal } from '@lumino/signaling';
import React from 'react';

import {
  changeOf,
  FieldOf,
  fieldsOf,
  IFields,
  isNotebook,
  LaunchModel,
  runsInKernel,
  takenFromServer
} from './launch';
import { CheckpointMode, IJob, IJobChange, ILaunchForm } from './wire';
import { checkpointLabel, checkpointText, duration } from './messages';
import { trans } from './translate';

/** The model of a dialog: its fields, their problems, and the refusal of the last attempt. */
export interface IForm<T>
  extends Pick<LaunchModel, 'fields' | 'set' | 'shownProblems' | 'projects' | 'refusal' | 'busy' | 'dispose'> {
  readonly changed: ISignal<unknown, unknown>;
  /** Resolves to null if refused. */
  submit(): Promise<T | null>;
}

interface IPartProps {
  model: IForm<unknown>;
}

interface IJobPartProps {
  model: LaunchModel;
}

/** Asks for a new job; returns it, or null when the dialog was closed. */
export function showLaunchDialog(model: LaunchModel): Promise<IJob | null> {
  return showForm(model, trans.__('Run as training job'), trans.__('Submit'), () => <JobForm model={model} />);
}

/** Changes a job in the queue; returns it, or null when the dialog was closed. */
export function showEditDialog(
  job: IJob,
  options: Pick<LaunchModel.IOptions, 'offers' | 'projects' | 'isHidden'>,
  send: (change: IJobChange) => Promise<IJob>
): Promise<IJob | null> {
  // The file is not read: only the fields below can be changed.
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
  return showForm(model, trans.__('Change %1', job.name), trans.__('Change'), () => (
    <>
      <Size model={model} />
      <Project model={model} />
      <Text
        model={model}
        field="priority"
        label={trans.__('Priority in its project')}
        hint={trans.__('Higher comes first; above 0 as far as its project has the right.')}
      />
      <MaxRun model={model} />
      <Verdict model={model} busy={trans.__('Submitting.')} />
    </>
  ));
}

/** Shows a form until it is submitted; returns the answer, or null when the dialog was closed. */
export async function showForm<T>(
  model: IForm<T>,
  title: string,
  ok: string,
  form: () => JSX.Element
): Promise<T | null> {
  const dialog = new FormDialog(model, title, ok, form);
  dialog.addClass('gpushare-launch-dialog');
  await dialog.launch();
  model.dispose();
  // A cancel after submission waits for the answer, because the submission may have succeeded.
  await dialog.submitting;
  return dialog.answer;
}

class FormDialog<T> extends Dialog<void> {
  constructor(
    private readonly _model: IForm<T>,
    title: string,
    ok: string,
    form: () => JSX.Element
  ) {
    const body = ReactWidget.create(<UseSignal signal={_model.changed}>{form}</UseSignal>);
    body.addClass('gpushare-launch');
    super({
      title,
      body,
      focusNodeSelector: 'input',
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: ok })]
    });
  }

  /** The answer to the submission. */
  answer: T | null = null;

  /** Resolves when no submission is running. */
  submitting: Promise<unknown> = Promise.resolve();

  /** JupyterLab looked for the first field before it existed, and submits on every Enter. */
  override handleEvent(event: Event): void {
    if (event instanceof KeyboardEvent && event.type === 'keydown' && event.target instanceof Element) {
      const fields = Array.from(this.node.querySelectorAll<HTMLElement>('.gpushare-launch input, .jp-Dialog-button'));
      const ends = [fields[0], fields[fields.length - 1]];
      const [from, to] = event.shiftKey ? ends : ends.reverse();
      if (event.key === 'Tab' && event.target === from) {
        event.preventDefault();
        event.stopPropagation();
        to?.focus();
        return;
      }
      if (event.key === 'Enter' && event.target.matches('summary')) {
        return;
      }
    }
    super.handleEvent(event);
  }

  /** Closes with the answer; a refusal leaves the dialog open. */
  override resolve(index?: number): void {
    if (index === 0) {
      super.resolve(0);
      return;
    }
    const submitted = this._model.submit().then(answer => {
      if (answer !== null) {
        this.answer = answer;
        super.resolve(1);
      }
    });
    this.submitting = Promise.all([this.submitting, submitted]);
  }
}

function JobForm(props: IJobPartProps): JSX.Element {
  const { model } = props;
  const { fields } = model;
  return (
    <>
      <Program {...props} />
      <Size {...props} />
      <Project {...props} />
      <Switch
        model={model}
        field="borrow"
        label={trans.__('May use borrowed GPUs')}
        hint={
          fields.borrow
            ? trans.__('It starts sooner, and is paused when their owner needs them.')
            : trans.__('It waits until GPUs that are guaranteed to its project are free.')
        }
      />
      <Select
        model={model}
        field="checkpoint"
        label={trans.__('When its GPU is needed')}
        hint={checkpointText(fields.checkpoint)}
        options={(['suspend', 'suspend,sigterm', 'sigterm', 'none'] as CheckpointMode[]).map(choice => [
          choice,
          checkpointLabel(choice)
        ])}
      />
      {model.shares && (
        <Switch
          model={model}
          field="share"
          label={trans.__('Share the GPU with another job')}
          hint={
            fields.share
              ? trans.__('It may start sooner, in what another job leaves unused, and is paused when that job needs it; and another job may run so on its GPU.')
              : trans.__('It has its GPUs to itself, and waits for GPUs of its own.')
          }
        />
      )}
      <Switch model={model} field="notify" label={trans.__('Notify me when it is paused or ends')} />
      <More {...props} />
      <Unseen {...props} />
      <Verdict model={model} outlook={model.outlook} busy={trans.__('Submitting.')} />
    </>
  );
}

/** Shown if there is a choice of projects. */
export function Project({ model }: IPartProps): JSX.Element | null {
  const { project } = model.fields;
  return project === '' || model.projects.every(name => name === project) ? null : (
    <Select
      model={model}
      field="project"
      label={trans.__('Project')}
      options={model.projects.map(name => [name, name])}
    />
  );
}

function MaxRun({ model }: IPartProps): JSX.Element {
  return (
    <Text
      model={model}
      field="maxRun"
      label={trans.__('Maximum run time')}
      placeholder={trans.__('none')}
      hint={trans.__('Like 4 h. Then it is stopped, with time to save; pauses do not count.')}
    />
  );
}

/** The program: a file with its arguments or parameters, or a command. */
function Program({ model }: IJobPartProps): JSX.Element {
  const { fields } = model;
  // Code from a cell keeps its lines.
  const [rows] = React.useState(() => Math.min(12, fields.command.split('\n').length));
  return (
    <>
      <Text
        model={model}
        field="path"
        label={trans.__('Notebook or script')}
        placeholder={trans.__('empty: run a command')}
        onBlur={() => void model.readFile()}
      />
      {fields.path === '' && (
        <Text
          model={model}
          field="command"
          label={trans.__('Command')}
          placeholder={trans.__('like %1', 'python train.py --epochs 10')}
          {...(rows > 1 && { rows })}
        />
      )}
      {fields.path !== '' && !isNotebook(fields.path) && (
        <Text model={model} field="arguments" label={trans.__('Arguments')} />
      )}
      {isNotebook(fields.path) && (
        <Text
          model={model}
          field="parameters"
          label={trans.__('Parameters')}
          rows={Math.max(2, Math.min(8, fields.parameters.split('\n').length))}
          placeholder={trans.__('like %1', 'lr = 0.1')}
          hint={trans.__('The notebook runs into a copy beside it, which you can open at any time.')}
        />
      )}
    </>
  );
}

/** Rarely needed fields. */
function More({ model }: IJobPartProps): JSX.Element {
  const { path } = model.fields;
  // Opens when a field inside is invalid, and stays open until the user closes it.
  const [more, setMore] = React.useState(false);
  return (
    <details
      open={more || ['cwd', 'variables', 'retries', 'maxRun', 'name'].some(field => field in model.shownProblems)}
      onToggle={event => setMore(event.currentTarget.open)}
    >
      <summary>{trans.__('Name, environment, retries, maximum run time')}</summary>
      <Text model={model} field="name" label={trans.__('Name')} placeholder={path.replace(/^.*\//, '')} />
      {runsInKernel(path) && (
        <Select
          model={model}
          field="kernel"
          label={trans.__('Environment')}
          options={[
            ['', isNotebook(path) ? trans.__('as the notebook says') : trans.__('of this server')],
            ...(model.form?.environments ?? [])
              .filter(({ language }) => isNotebook(path) || language === 'python')
              .map(({ name, display_name }) => [name, display_name] as const)
          ]}
        />
      )}
      <Text model={model} field="cwd" label={trans.__('Folder')} />
      <Text model={model} field="variables" label={trans.__('Variables')} rows={2} placeholder={trans.__('like %1', 'SEED=1')} />
      <Text model={model} field="retries" label={trans.__('Tries after a failure')} />
      <Text
        model={model}
        field="notifyUrl"
        label={trans.__('Webhook')}
        placeholder={trans.__('like %1', 'https://chat.example.org/hook')}
        hint={trans.__('The job tells this address when it starts, is stopped and ends.')}
      />
      <MaxRun model={model} />
      <Switch
        model={model}
        field="move"
        label={trans.__('May resume on another GPU')}
        hint={trans.__('While its own GPU is in use, it resumes on another of the same model in its machine. Switch this off for a program that remembers its GPU.')}
      />
    </details>
  );
}

/** Settings of the job that have no field in this dialog. */
function Unseen({ model }: IJobPartProps): JSX.Element {
  const { fields } = model;
  const taken = takenFromServer(fields);
  const lines = [
    taken.length > 0 && trans.__('Variables with the value that this server has: %1', taken.join(', ')),
    Number(fields.priority) !== 0 && trans.__('Priority in its project: %1', fields.priority),
    fields.grace !== null && trans.__('Time to save a checkpoint: %1', duration(fields.grace))
  ];
  return (
    <>
      {lines.map(
        (text, n) =>
          text !== false && (
            <div key={n} className="gpushare-field gpushare-muted">
              {text}
            </div>
          )
      )}
    </>
  );
}

/** The lines above the button: `outlook` for a new job, the refusal, and `busy` during a submission. */
export function Verdict(props: IPartProps & { outlook?: string; busy: string }): JSX.Element {
  const { model, outlook, busy } = props;
  return (
    <div className="gpushare-verdict">
      {outlook !== undefined && (
        <p className="gpushare-outlook" role="status">
          {outlook}
        </p>
      )}
      {model.refusal !== '' && (
        <p className="gpushare-refusal" role="alert">
          {model.refusal}
        </p>
      )}
      {model.busy && <p role="status">{busy}</p>}
    </div>
  );
}

interface ITextProps extends IPartProps {
  field: FieldOf<string>;
  label: string;
  hint?: string;
  placeholder?: string;
  rows?: number;
  /** Whether the text was refused. */
  isRefused?: boolean;
  onBlur?: () => void;
}

export function Text(props: ITextProps): JSX.Element {
  const { model, field, label, hint } = props;
  const problem = model.shownProblems[field];
  const id = `gpushare-launch-${field}`;
  const shared = {
    id,
    value: model.fields[field],
    placeholder: props.placeholder,
    spellCheck: false,
    autoComplete: 'off',
    'aria-invalid': problem !== undefined || props.isRefused === true,
    'aria-describedby': problem !== undefined ? `${id}-problem` : hint && `${id}-hint`,
    onBlur: props.onBlur,
    onChange: (event: { target: { value: string } }) => model.set({ [field]: event.target.value })
  };
  return (
    <div className="gpushare-field">
      <label htmlFor={id}>{label}</label>
      {props.rows === undefined ? (
        <input type="text" className="jp-mod-styled" {...shared} />
      ) : (
        <textarea className="jp-mod-styled" rows={props.rows} {...shared} />
      )}
      {problem !== undefined && (
        <span className="gpushare-problem" id={`${id}-problem`}>
          {problem}
        </span>
      )}
      <Hint id={id} text={hint} />
    </div>
  );
}

function Hint(props: { id: string; text?: string }): JSX.Element | null {
  return props.text === undefined ? null : (
    <span className="gpushare-muted" id={`${props.id}-hint`}>
      {props.text}
    </span>
  );
}

function Select(props: {
  model: IForm<unknown>;
  field: FieldOf<string>;
  label: string;
  hint?: string;
  options: readonly (readonly [string, string])[];
}): JSX.Element {
  const { model, field, label, hint } = props;
  const id = `gpushare-launch-${field}`;
  const chosen = model.fields[field];
  // If the chosen option no longer exists, a browser would show the first one instead.
  const exists = props.options.some(([value]) => value === chosen);
  const options = exists ? props.options : [...props.options, [chosen, chosen] as const];
  return (
    <div className="gpushare-field">
      <label htmlFor={id}>{label}</label>
      <select
        id={id}
        value={chosen}
        aria-describedby={hint && `${id}-hint`}
        onChange={event => model.set({ [field]: event.target.value })}
      >
        {options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
      <Hint id={id} text={hint} />
    </div>
  );
}

export function Switch(props: {
  model: IForm<unknown>;
  field: FieldOf<boolean>;
  label: string;
  hint?: string;
}): JSX.Element {
  const { model, field, label, hint } = props;
  const id = `gpushare-launch-${field}`;
  return (
    <div className="gpushare-field gpushare-switch">
      <label>
        <input
          type="checkbox"
          checked={model.fields[field]}
          aria-describedby={hint && `${id}-hint`}
          onChange={event => model.set({ [field]: event.target.checked })}
        />
        {label}
      </label>
      <Hint id={id} text={hint} />
    </div>
  );
}

function Size({ model }: IPartProps): JSX.Element {
  const { size, gpus, profile } = model.fields;
  const choice = (value: IFields['size'], label: string): JSX.Element => (
    <label>
      <input
        type="radio"
        name="gpushare-launch-size"
        checked={size === value}
        onChange={() => model.set({ size: value })}
      />
      {label}
    </label>
  );
  return (
    <fieldset className="gpushare-field">
      <legend>{trans.__('How much')}</legend>
      <div className="gpushare-choices">
        {choice('gpus', trans.__('GPUs'))}
        {choice('memory', trans.__('GPU memory of one GPU'))}
        {profile !== '' && choice('profile', trans.__('MIG instance %1', profile))}
      </div>
      {size === 'gpus' && (
        <Text
          model={model}
          field="gpus"
          label={trans.__('Number or part')}
          placeholder={trans.__('like %1', '0.5')}
          hint={Number(gpus) > 1 ? trans.__('All of them together, or none.') : undefined}
        />
      )}
      {size === 'memory' && (
        <Text model={model} field="memory" label={trans.__('Size')} placeholder={trans.__('like %1', '20GiB')} />
      )}
    </fieldset>
  );
}
