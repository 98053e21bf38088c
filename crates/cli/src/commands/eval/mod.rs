//! `clary eval`: built-in evaluations.

mod exact;
mod vision;

use crate::args::Eval;
use crate::error::Result;
use crate::output::Output;

/// Runs an evaluation.
pub(crate) fn eval(eval: &Eval, output: &Output) -> Result {
    match eval {
        Eval::Exact(args) => exact::exact(args, output),
        Eval::Vision(args) => vision::vision_eval(args, output),
    }
}
