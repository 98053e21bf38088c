//! The table and the document of a bench.

use std::time::Duration;

use serde_json::{Value, json};

use super::machine::Machine;
use super::measure::Case;
use super::{BenchArgs, Measured};
use crate::error::Result;
use crate::output::Output;
use crate::table::{self, Table, grouped};

/// Smallest, median and largest.
struct Spread {
    min: f64,
    median: f64,
    max: f64,
}

impl Spread {
    /// Tokens per second of repetitions of `tokens` tokens.
    fn of(tokens: usize, times: &[Duration]) -> Self {
        let rate = |time: &Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        let mut rates: Vec<f64> = times.iter().map(rate).collect();
        rates.sort_by(f64::total_cmp);
        Self { min: rates[0], median: rates[rates.len() / 2], max: rates[rates.len() - 1] }
    }

    fn document(&self) -> Value {
        json!({"min": self.min, "median": self.median, "max": self.max})
    }

    fn cells(&self) -> [String; 3] {
        [self.min, self.median, self.max].map(|rate| format!("{rate:.1}"))
    }
}

/// A case with its shares of the machine, from medians.
struct Line<'a> {
    case: &'a Case,
    prefill: Spread,
    decode: Spread,
    /// Multiply-adds per second of prefill, and their share of the 16-bit peak.
    work: f64,
    work_share: f64,
    /// Bytes per second of decode, and their share of the read bandwidth.
    read: f64,
    read_share: f64,
}

impl<'a> Line<'a> {
    fn new(case: &'a Case, machine: &Machine, work: u64) -> Self {
        let prefill = Spread::of(case.prompt, &case.prefill);
        let decode = Spread::of(case.tokens, &case.decode);
        let (work, read) = (prefill.median * work as f64, decode.median * case.bytes_per_token as f64);
        let (work_share, read_share) = (work / machine.dot16, read / machine.read);
        Self { case, prefill, decode, work, work_share, read, read_share }
    }
}

/// Prints what was measured.
pub(super) fn print(measured: &Measured, args: &BenchArgs, output: &Output) -> Result {
    let machine = |threads: usize| {
        let machine = measured.machines.iter().find(|machine| machine.threads == threads);
        machine.expect("every number of threads was measured")
    };
    let lines = measured.cases.iter().map(|case| Line::new(case, machine(case.threads), measured.work));
    let lines: Vec<Line<'_>> = lines.collect();
    if output.json {
        return Ok(output.document(&document(measured, &lines, args))?);
    }
    let mut text = format!("{}\n{}, {} repetitions\n\n", args.model.model, measured.device, args.reps);
    text.push_str(&output.bold("prefill, tokens per second; multiply-adds of weight matrices per second\n"));
    text.push_str(&prefill(&lines).text());
    text.push_str(&output.bold("\ndecode, tokens per second; bytes read per token and per second\n"));
    text.push_str(&decode(&lines).text());
    text.push_str(&output.bold("\nmachine, measured in this run\n"));
    text.push_str(&machines(&measured.machines).text());
    text.push('\n');
    for (threads, time) in &measured.loads {
        let plural = if *threads == 1 { "" } else { "s" };
        text.push_str(&format!("load {:.2} s with {threads} thread{plural}\n", time.as_secs_f64()));
    }
    text.push_str(&memory(measured));
    text.push_str("loaded for one sequence without drafts: no MTP layer and no vision tower\n");
    Ok(output.out(&text)?)
}

fn memory(measured: &Measured) -> String {
    let weights = table::bytes(measured.weights);
    match measured.peak {
        Some(peak) => {
            let ratio = peak as f64 / measured.weights as f64;
            format!("peak memory {}, {ratio:.2} times the weights loaded ({weights})\n", table::bytes(peak))
        }
        None => format!("peak memory unavailable here; the weights loaded have {weights}\n"),
    }
}

fn prefill(lines: &[Line<'_>]) -> Table {
    let mut table = Table::new(">>>>>>>");
    table.row(["threads", "prompt", "min", "median", "max", "G/s", "of 16-bit peak"]);
    for line in lines {
        let [min, median, max] = line.prefill.cells();
        let (threads, prompt) = (line.case.threads.to_string(), grouped(line.case.prompt as u64));
        let (work, share) = (format!("{:.1}", line.work / 1e9), percent(line.work_share));
        table.row([&threads, &prompt, &min, &median, &max, &work, &share]);
    }
    table
}

fn decode(lines: &[Line<'_>]) -> Table {
    let mut table = Table::new(">>>>>>>><");
    table.row(["threads", "prompt", "min", "median", "max", "per token", "GB/s", "of reading", "token hash"]);
    for line in lines {
        let [min, median, max] = line.decode.cells();
        let (threads, prompt) = (line.case.threads.to_string(), grouped(line.case.prompt as u64));
        let bytes = table::bytes(line.case.bytes_per_token);
        let (read, share) = (format!("{:.2}", line.read / 1e9), percent(line.read_share));
        let hash = &line.case.hashes[0][..12];
        table.row([&threads, &prompt, &min, &median, &max, &bytes, &read, &share, hash]);
    }
    table
}

fn machines(machines: &[Machine]) -> Table {
    let mut table = Table::new(">>>>");
    table.row(["threads", "read GB/s", "16-bit Gmac/s", "f32 Gmac/s"]);
    for machine in machines {
        let [read, dot16, f32] =
            [machine.read, machine.dot16, machine.f32].map(|x| format!("{:.1}", x / 1e9));
        table.row([&machine.threads.to_string(), &read, &dot16, &f32]);
    }
    table
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn document(measured: &Measured, lines: &[Line<'_>], args: &BenchArgs) -> Value {
    let case = |line: &Line<'_>| {
        json!({
            "threads": line.case.threads,
            "prompt": line.case.prompt,
            "tokens": line.case.tokens,
            "prefill_tokens_per_s": line.prefill.document(),
            "prefill_macs_per_s": line.work,
            "prefill_share_of_dot16": line.work_share,
            "decode_tokens_per_s": line.decode.document(),
            "bytes_per_token": line.case.bytes_per_token,
            "decode_bytes_per_s": line.read,
            "decode_share_of_read": line.read_share,
            "token_hash": line.case.hashes[0],
        })
    };
    let machine = |machine: &Machine| {
        json!({
            "threads": machine.threads,
            "read_bytes_per_s": machine.read,
            "dot16_macs_per_s": machine.dot16,
            "f32_macs_per_s": machine.f32,
        })
    };
    let load =
        |(threads, time): &(usize, Duration)| json!({"threads": threads, "seconds": time.as_secs_f64()});
    json!({
        "model": args.model.model,
        "device": measured.device,
        "reps": args.reps,
        "cases": lines.iter().map(case).collect::<Vec<_>>(),
        "machine": measured.machines.iter().map(machine).collect::<Vec<_>>(),
        "load": measured.loads.iter().map(load).collect::<Vec<_>>(),
        "peak_bytes": measured.peak,
        "weights_bytes": measured.weights,
    })
}
