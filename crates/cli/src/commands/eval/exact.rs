//! `clary eval exact`: the contracts of `docs/api.md` section 1 on this machine and model.

use contracts::{ALBUM_TOKENS, Contract, Exact, Outcome, Sizes as ContractSizes, Subject};
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use model::Model;
use model::qwen3_5::{OpenError, open};
use serde_json::{Value, json};

use crate::args::{Ctx, Draft, ExactArgs};
use crate::error::{Exit, Failure, Result};
use crate::interrupt::Interrupt;
use crate::load::{self, Sizes};
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::table::{Table, grouped};
use crate::weights::Weights;

/// Tokens of the text: past the ends of two blocks.
const QUICK: usize = 140;
/// With `--full`: nine blocks, past the end of a span of 512 keys.
const FULL: usize = 600;
/// The contract that shows where replies become text.
const STREAMED: (&str, &str) = ("E4", "stream equals non-stream");

/// Opens the weights again and again, with settings of its own.
struct Machine<'a> {
    weights: &'a Weights,
    device: String,
    kv: KvForm,
    cpu: CpuSettings,
}

impl Subject for Machine<'_> {
    fn name(&self) -> String {
        match self.device.as_str() {
            "cpu" => format!("cpu with {}, {} threads", self.cpu.isa.name(), self.cpu.threads),
            device => device.to_owned(),
        }
    }

    fn open(&self, sizes: ContractSizes) -> std::result::Result<Box<dyn Model>, contracts::Error> {
        let failed =
            |source: OpenError| contracts::Error::Open { subject: self.name(), source: Box::new(source) };
        let mut device =
            device::open(&self.device, load::opening(self.cpu)).map_err(|error| failed(error.into()))?;
        let settings = sizes.settings_with_pictures(self.kv, &mut *device);
        let model = open(self.weights.source(), device, settings, &mut |_, _| {});
        Ok(Box::new(model.map_err(failed)?))
    }
}

/// Runs every contract and prints a row for each.
pub(crate) fn exact(args: &ExactArgs, output: &Output) -> Result {
    super::super::no_template(&args.model, output)?;
    if args.model.machine.device == "reference" {
        let message = "the reference device judges errors; it is outside the contracts";
        return Err(Failure::usage(message).hint("--device cpu"));
    }
    Interrupt::install()?;
    let weights = Weights::open(&args.model.model)?;
    let device = load::named(&args.model.machine.device, &weights);
    let kv = load::form(args.model.kv);
    let cpu = CpuSettings { threads: load::threads(args.threads.threads), isa: Isa::detect() };
    let subject = Machine { weights: &weights, device, kv, cpu };
    let others = others(&subject, args.full);
    let mut plan = Exact {
        subject: &subject,
        others: &others,
        vocabulary: weights.config.vocabulary,
        tokens: if args.full { FULL } else { QUICK },
        streams: &args.streams,
        replies: args.full,
        moved: false,
    };
    plan.moved = fits(&weights, args, plan.sizes())? && args.full;
    let mut progress = Progress::new(output, "checking", Unit::Count);
    let outcomes = contracts::exact(&plan, &mut |done, total| progress.set(done, total))?;
    drop(progress);
    report(&outcomes, &plan, args, output)?;
    judged(&outcomes)
}

/// Fails with the code of a mismatch where a contract does not hold.
fn judged(outcomes: &[Outcome]) -> Result {
    match outcomes.iter().find(|outcome| !outcome.held()) {
        None => Ok(()),
        Some(outcome) => Err(Failure::new(
            Exit::Mismatch,
            format!(
                "{} ({}) does not hold: {}",
                outcome.contract.id(),
                outcome.contract.promise(),
                verdict(outcome)
            ),
        )
        .hint("this is a fault of the program or of the machine; please report it with the table")),
    }
}

/// What the subject is compared with: on the CPU other instruction sets and thread counts, else the CPU.
fn others<'a>(subject: &Machine<'a>, full: bool) -> Vec<Box<dyn Subject + 'a>> {
    let best = Isa::detect();
    let on_cpu = |threads: usize, isa: Isa| -> Box<dyn Subject + 'a> {
        let cpu = CpuSettings { threads, isa };
        Box::new(Machine { device: "cpu".into(), cpu, ..*subject })
    };
    if subject.device != "cpu" {
        return vec![on_cpu(subject.cpu.threads, best)];
    }
    let threads = subject.cpu.threads;
    let mut others = vec![on_cpu(threads + 1, best)];
    others.extend((threads > 1).then(|| on_cpu(1, best)));
    // Without vectors a large model takes hours.
    let isas = Isa::supported().into_iter().filter(|isa| *isa != best && (full || isa.name() != "scalar"));
    others.extend(isas.map(|isa| on_cpu(threads, isa)));
    others
}

/// Refuses what does not fit once; whether it fits twice.
fn fits(weights: &Weights, args: &ExactArgs, sizes: ContractSizes) -> Result<bool> {
    let wish = Sizes {
        slots: sizes.slots,
        snapshots: sizes.snapshots,
        ctx: Ctx::Tokens(sizes.context),
        rows_max: sizes.rows_max,
        logits_rows_max: sizes.rows_max,
        mtp: true,
        image_tokens: if weights.parts.vision { ALBUM_TOKENS } else { 0 },
        draft: Draft::Auto,
    };
    load::settle(weights, &args.model, wish)?;
    let twice = load::settle(weights, &args.model, Sizes { slots: 2 * sizes.slots, ..wish });
    Ok(twice.is_ok())
}

fn verdict(outcome: &Outcome) -> &str {
    match &outcome.difference {
        Some(difference) => difference,
        None if outcome.compared == 0 => "nothing was compared",
        None => "held",
    }
}

fn report(outcomes: &[Outcome], plan: &Exact<'_>, args: &ExactArgs, output: &Output) -> Result {
    if output.json {
        return Ok(output.document(&document(outcomes, plan, args))?);
    }
    let mut table = Table::new("<<<><");
    table.row(["id", "contract", "cases", "compared", "result"]);
    let (id, promise) = STREAMED;
    let mut streamed = Some([id, promise, "the server's tests show it", "", "not run here"]);
    for outcome in outcomes {
        if outcome.contract > Contract::Resumed
            && let Some(cells) = streamed.take()
        {
            table.row(cells);
        }
        let (id, promise) = (outcome.contract.id(), outcome.contract.promise());
        table.row([id, promise, outcome.case, &grouped(outcome.compared as u64), verdict(outcome)]);
    }
    let streams: Vec<String> = plan.streams.iter().map(ToString::to_string).collect();
    let head = format!(
        "{}\n{}, --kv {}, {} tokens, {} streams\n\n",
        args.model.model,
        plan.subject.name(),
        format!("{:?}", args.model.kv).to_lowercase(),
        plan.tokens,
        streams.join(", "),
    );
    Ok(output.out(&(head + &table.text()))?)
}

fn document(outcomes: &[Outcome], plan: &Exact<'_>, args: &ExactArgs) -> Value {
    let row = |outcome: &Outcome| {
        json!({
            "id": outcome.contract.id(),
            "contract": outcome.contract.promise(),
            "cases": outcome.case,
            "compared": outcome.compared,
            "held": outcome.held(),
            "difference": outcome.difference,
        })
    };
    let (id, promise) = STREAMED;
    let compared: Vec<String> = plan.others.iter().map(|other| other.name()).collect();
    json!({
        "model": args.model.model,
        "device": plan.subject.name(),
        "compared_with": compared,
        "tokens": plan.tokens,
        "streams": plan.streams,
        "held": outcomes.iter().all(Outcome::held),
        "contracts": outcomes.iter().map(row).collect::<Vec<_>>(),
        "not_run": [{"id": id, "contract": promise}],
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use contracts::Folder;

    use super::*;

    /// The contracts over a tiny model and another subject that should be its equal.
    fn outcomes(other: KvForm) -> Vec<Outcome> {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tiny-a"));
        let with = |kv: KvForm, threads: usize| {
            let cpu = CpuSettings { threads, isa: Isa::detect() };
            Folder { kv, cpu, ..Folder::new(folder, "cpu") }
        };
        let others: [Box<dyn Subject>; 1] = [Box::new(with(other, 1))];
        let plan = Exact {
            subject: &with(KvForm::Int16, 2),
            others: &others,
            vocabulary: 2000,
            tokens: QUICK,
            streams: &[2],
            replies: false,
            moved: false,
        };
        contracts::exact(&plan, &mut |_, _| {}).expect("the tiny model runs")
    }

    #[test]
    fn a_broken_contract_ends_with_code_7() {
        judged(&outcomes(KvForm::Int16)).expect("equals agree");
        // The other K/V form is another arithmetic: the devices differ.
        let failure = judged(&outcomes(KvForm::Int8)).expect_err("they are no equals");
        assert_eq!(failure.exit as u8, 7);
        assert!(failure.message.contains("does not hold") && failure.hint.is_some(), "{}", failure.message);
        // What was never compared does not count as held.
        let mut idle = outcomes(KvForm::Int16);
        idle[0].compared = 0;
        assert_eq!(judged(&idle).expect_err("nothing was compared").exit, Exit::Mismatch);
    }
}
