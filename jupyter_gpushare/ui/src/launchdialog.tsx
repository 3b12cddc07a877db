/** The dialog "Run as training job": its fields, and the live line above the button. */

import { Dialog } from '@jupyterlab/apputils';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { FieldOf, IFields, isNotebook, LaunchModel, runsInKernel, takenFromServer } from './launch';
import { outlookText } from './outlook';
import { CheckpointMode, IJob } from './wire';
import { checkpointLabel, checkpointText, duration } from './messages';
import { trans } from './translate';

/** Shows the dialog; returns the job, or null when it was closed. */
export async function showLaunchDialog(
  model: LaunchModel,
  kind: IKind = { title: trans.__('Run as training job'), ok: trans.__('Submit'), form: Form }
): Promise<IJob | null> {
  const dialog = new LaunchDialog(model, kind);
  dialog.addClass('gpushare-launch-dialog');
  await dialog.launch();
  model.dispose();
  // A cancel after submission waits for the answer, which tells that the job exists.
  await dialog.submitting;
  return dialog.job;
}

/** What differs between the dialog of a new job and that of one in the queue. */
interface IKind {
  readonly title: string;
  readonly ok: string;
  readonly form: (props: IPartProps) => JSX.Element;
}

class LaunchDialog extends Dialog<void> {
  constructor(
    private readonly _model: LaunchModel,
    kind: IKind
  ) {
    super({
      title: kind.title,
      body: new LaunchBody(_model, kind.form),
      focusNodeSelector: 'input',
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: kind.ok })]
    });
  }

  /** What was submitted. */
  job: IJob | null = null;

  /** Until nothing is under way. */
  submitting: Promise<unknown> = Promise.resolve();

  /** JupyterLab looked for the first field before there was one, and takes every Enter for a yes. */
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

  /** Closes with the job; a refusal leaves the dialog open. */
  override resolve(index?: number): void {
    if (index === 0) {
      super.resolve(0);
      return;
    }
    const submitted = this._model.submit().then(job => {
      if (job !== null) {
        this.job = job;
        super.resolve(1);
      }
    });
    this.submitting = Promise.all([this.submitting, submitted]);
  }
}

class LaunchBody extends ReactWidget {
  constructor(
    private readonly _model: LaunchModel,
    private readonly _form: IKind['form']
  ) {
    super();
    this.addClass('gpushare-launch');
  }

  protected override render(): JSX.Element {
    const Fields = this._form;
    return (
      <UseSignal signal={this._model.changed}>
        {() => <Fields model={this._model} />}
      </UseSignal>
    );
  }
}

export interface IPartProps {
  model: LaunchModel;
}

function Form(props: IPartProps): JSX.Element {
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
        options={(['suspend', 'sigterm', 'none'] as CheckpointMode[]).map(choice => [
          choice,
          checkpointLabel(choice)
        ])}
      />
      <Switch model={model} field="notify" label={trans.__('Notify me when it is paused or ends')} />
      <More {...props} />
      <Unseen {...props} />
      <Verdict {...props} />
    </>
  );
}

/** Shown where there is a choice. */
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

export function MaxRun({ model }: IPartProps): JSX.Element {
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

/** What runs: a file with its arguments or parameters, or a command. */
function Program({ model }: IPartProps): JSX.Element {
  const { fields } = model;
  // A cell's code has lines, and stays what it was.
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

/** Fields that are seldom needed. */
function More({ model }: IPartProps): JSX.Element {
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
    </details>
  );
}

/** What the job gets without a field of its own. */
function Unseen({ model }: IPartProps): JSX.Element {
  const { fields } = model;
  const taken = takenFromServer(fields);
  const lines = [
    taken.length > 0 && trans.__('Variables with the value that this server has: %1', taken.join(', ')),
    fields.priority !== 0 && trans.__('Priority in its project: %1', fields.priority),
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

/** `outlook`: the live line of a job that would be submitted now. */
export function Verdict({ model, outlook = true }: IPartProps & { outlook?: boolean }): JSX.Element {
  return (
    <div className="gpushare-verdict">
      {outlook && (
        <p className="gpushare-outlook" role="status">
          {outlookText(model.outlook)}
        </p>
      )}
      {model.refusal !== '' && (
        <p className="gpushare-refusal" role="alert">
          {model.refusal}
        </p>
      )}
      {model.busy && <p role="status">{trans.__('Submitting.')}</p>}
    </div>
  );
}

export interface ITextProps {
  model: LaunchModel;
  field: FieldOf<string>;
  label: string;
  hint?: string;
  placeholder?: string;
  rows?: number;
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
    'aria-invalid': problem !== undefined,
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
  model: LaunchModel;
  field: FieldOf<string>;
  label: string;
  hint?: string;
  options: readonly (readonly [string, string])[];
}): JSX.Element {
  const { model, field, label, hint } = props;
  const id = `gpushare-launch-${field}`;
  const chosen = model.fields[field];
  // A browser would show the first option for one that is not there any more.
  const isThere = props.options.some(([value]) => value === chosen);
  const options = isThere ? props.options : [...props.options, [chosen, chosen] as const];
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

function Switch(props: {
  model: LaunchModel;
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

export function Size({ model }: IPartProps): JSX.Element {
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
