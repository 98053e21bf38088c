//! Progress on stderr: a bar on a terminal, else a line every 10 seconds.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;
use crate::table;

/// Time between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Bytes.
    Bytes,
    /// Plain numbers.
    Count,
}

/// Progress of one piece of work. Gone when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    unit: Unit,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Bar(ProgressBar),
    Lines { last: Instant, output: Output },
    None,
}

impl Progress {
    /// Starts counting.
    pub(crate) fn new(output: &Output, what: &'static str, unit: Unit) -> Self {
        let form = if output.quiet {
            Form::None
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let counted = match unit {
                Unit::Bytes => "{bytes} of {total_bytes}  {bytes_per_sec}",
                Unit::Count => "{percent} %",
            };
            let template = format!("{what}  {{bar:40}}  {counted}");
            let style = ProgressStyle::with_template(&template).expect("the template is valid");
            bar.set_style(style.progress_chars("=> "));
            Form::Bar(bar)
        } else {
            Form::Lines { last: Instant::now(), output: *output }
        };
        Self { what, unit, form }
    }

    /// Sets how much is done of how much.
    pub(crate) fn set(&mut self, done: u64, total: u64) {
        match &mut self.form {
            Form::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
            }
            Form::Lines { last, output } if last.elapsed() >= LINE_EVERY => {
                *last = Instant::now();
                let counted = match self.unit {
                    Unit::Bytes => format!("{} of {}", table::bytes(done), table::bytes(total)),
                    Unit::Count => format!("{} %", (done * 100).checked_div(total).unwrap_or(100)),
                };
                // Progress that nobody can see is no reason to stop the work.
                let _ = output.note(&format!("{}: {counted}", self.what));
            }
            Form::Lines { .. } | Form::None => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Form::Bar(bar) = &self.form {
            bar.finish_and_clear();
        }
    }
}
