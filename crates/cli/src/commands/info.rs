//! `clary info`: what a model is, what it needs and what can run it.

use std::collections::BTreeMap;

use checkpoint::{DtypeReport, FileReport, Report};
use device::KvForm;
use model::qwen3_5::{Config, MemoryPlan, MixerKind, Settings};
use serde_json::{Value, json};
use text::ChatTemplate;

use crate::args::InfoArgs;
use crate::error::Result;
use crate::load::{self, ROWS_MAX};
use crate::output::Output;
use crate::table::{self, Table, grouped};
use crate::weights::Weights;
use crate::{memory, scheme};

/// Prints everything about a MODEL that can be known without reading its weights.
pub(crate) fn info(args: &InfoArgs, output: &Output) -> Result {
    let weights = Weights::open(&args.model)?;
    let facts = Facts::of(&weights);
    if output.json {
        return Ok(output.document(&facts.document(&weights))?);
    }
    let mut text = facts.general(&weights).text();
    if let Some(report) = &facts.report {
        text.push_str(&format!("\n{}\n{}", output.bold("tensors"), dtypes(report).text()));
    }
    text.push_str(&format!("\n{}\n{}", output.bold("modules"), facts.modules().text()));
    let heading = format!(
        "memory, one sequence of {} tokens, all that is stored loaded",
        grouped(facts.settings.context as u64)
    );
    text.push_str(&format!(
        "\n{}\n{}",
        output.bold(&heading),
        memory::budget(&facts.plan, &facts.settings).text()
    ));
    text.push_str(&format!("\n{}\n{}", output.bold("devices"), devices().text()));
    for warning in &weights.warnings {
        text.push_str(&format!("\nwarning: {warning}\n"));
    }
    Ok(output.out(&text)?)
}

struct Facts {
    report: Option<Report>,
    /// SHA-256 of the chat template, or why there is none.
    template: std::result::Result<String, String>,
    settings: Settings,
    plan: MemoryPlan,
    /// Modules by class, then by form, with their number.
    modules: BTreeMap<&'static str, BTreeMap<String, usize>>,
}

impl Facts {
    fn of(weights: &Weights) -> Self {
        let template = ChatTemplate::open(&weights.dir);
        let context = weights.config.positions_max.min(4096);
        let settings = Settings {
            slots: 1,
            snapshots: 0,
            context,
            pages: 1,
            kv: KvForm::Int8,
            rows_max: ROWS_MAX,
            logits_rows_max: 1,
            mtp: weights.parts.mtp,
            image_tokens: 0,
            card: false,
        };
        let settings = settings.with_context(context);
        Self {
            report: weights.report(),
            template: template
                .map(|template| template.digest().to_owned())
                .map_err(|error| error.to_string()),
            plan: MemoryPlan::new(&weights.config, &settings, weights.parts.mtp, weights.bytes),
            settings,
            modules: scheme::by_class(weights),
        }
    }

    fn general(&self, weights: &Weights) -> Table {
        let config = &weights.config;
        let mut table = Table::new("<<");
        let there = |there: bool| if there { "present" } else { "not there" };
        table.row(["family", "qwen3_5_moe"]);
        let format = self.report.as_ref().map_or("synthetic".to_owned(), |report| report.format.to_string());
        table.row(["format", &format]);
        table.row(["parameters", &grouped(config.parameters())]);
        table.row(["layers", &layers(config)]);
        let experts = format!("{}, {} per token and a shared one", config.experts, config.picks);
        table.row([
            "experts",
            &format!("{experts}; widths {} and {}", config.expert_width, config.shared_width),
        ]);
        table.row(["hidden", &config.hidden.to_string()]);
        let a = config.attention;
        table.row([
            "attention",
            &format!("{} heads, {} k/v heads, width {}", a.heads, a.kv_heads, a.head_dim),
        ]);
        let d = config.delta;
        let heads = format!("{} key heads of {}", d.key_heads, d.key_dim);
        table.row(["delta net", &format!("{heads}, {} value heads of {}", d.value_heads, d.value_dim)]);
        table.row(["vocabulary", &grouped(config.vocabulary as u64)]);
        table.row(["context", &format!("{} tokens", grouped(config.positions_max as u64))]);
        table.row(["MTP", &self.mtp(weights)]);
        table.row(["vision", there(weights.parts.vision)]);
        let template = match &self.template {
            Ok(digest) => format!("sha256:{digest}"),
            Err(reason) => format!("none ({reason})"),
        };
        table.row(["template", &template]);
        if let Some(report) = &self.report {
            let files: Vec<&str> = report.files.iter().map(|file| file.name.as_str()).collect();
            let shown = if files.len() > 3 { format!("{} files", files.len()) } else { files.join(", ") };
            let mtp = if weights.parts.mtp { ", MTP" } else { "" };
            let vision = if weights.parts.vision { ", vision" } else { "" };
            let size = table::bytes(report.bytes);
            table.row(["files", &format!("{shown}; {size} of weights stored: text{mtp}{vision}")]);
        }
        table
    }

    fn mtp(&self, weights: &Weights) -> String {
        if !weights.parts.mtp {
            return "not there".to_owned();
        }
        match self.report.as_ref().and_then(|report| report.mtp.as_ref()) {
            Some(mtp) => format!("present, {} tensors in {}", mtp.tensors, mtp.files.join(", ")),
            None => "present".to_owned(),
        }
    }

    fn modules(&self) -> Table {
        let mut table = Table::new("<><");
        for (class, forms) in &self.modules {
            for (form, count) in forms {
                table.row([class, &grouped(*count as u64), form]);
            }
        }
        table
    }

    fn document(&self, weights: &Weights) -> Value {
        let (config, report) = (&weights.config, self.report.as_ref());
        let dtypes = report.map(|report| {
            let one = |d: &DtypeReport| json!({"dtype": d.dtype, "tensors": d.tensors, "bytes": d.bytes});
            report.dtypes.iter().map(one).collect::<Vec<_>>()
        });
        let files = report.map(|report| {
            let one = |f: &FileReport| json!({"name": f.name, "tensors": f.tensors, "bytes": f.bytes});
            report.files.iter().map(one).collect::<Vec<_>>()
        });
        let devices: Vec<Value> = device_rows()
            .into_iter()
            .map(|(name, runs, detail)| json!({"device": name, "runs": runs, "detail": detail}))
            .collect();
        json!({
            "family": "qwen3_5_moe",
            "format": report.map(|report| report.format.to_string()),
            "parameters": config.parameters(),
            "layers": config.layers.len(),
            "attention_layers": config.layers_of(MixerKind::Attention).count(),
            "experts": config.experts,
            "experts_per_token": config.picks,
            "hidden": config.hidden,
            "heads": config.attention.heads,
            "kv_heads": config.attention.kv_heads,
            "head_dim": config.attention.head_dim,
            "vocabulary": config.vocabulary,
            "context": config.positions_max,
            "mtp": weights.parts.mtp,
            "vision": weights.parts.vision,
            "template_sha256": self.template.as_ref().ok(),
            "bytes": weights.bytes,
            "dtypes": dtypes,
            "files": files,
            "modules": self.modules,
            "memory": {
                "context": self.settings.context,
                "weights": self.plan.weights,
                "kv": self.plan.kv,
                "states": self.plan.states,
                "scratch": self.plan.scratch,
                "total": self.plan.total(),
            },
            "devices": devices,
            "warnings": weights.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    }
}

fn layers(config: &Config) -> String {
    let attention = config.layers_of(MixerKind::Attention).count();
    format!(
        "{}: {} gated delta net, {attention} attention",
        config.layers.len(),
        config.layers.len() - attention
    )
}

fn dtypes(report: &Report) -> Table {
    let mut table = Table::new("<>>");
    for dtype in &report.dtypes {
        table.row([dtype.dtype, &grouped(dtype.tensors as u64), &table::bytes(dtype.bytes)]);
    }
    table.row(["all", &grouped(report.tensors as u64), &table::bytes(report.bytes)]);
    table
}

fn devices() -> Table {
    let mut table = Table::new("<<<");
    for (name, runs, detail) in device_rows() {
        table.row([&name, if runs { "runs" } else { "no" }, &detail]);
    }
    table
}

/// Every device that options can name: whether it can run here, and its name or the reason why not.
fn device_rows() -> Vec<(String, bool, String)> {
    let row = |name: &str| match load::device(name, None) {
        Ok(device) => (name.to_owned(), true, device.name()),
        Err(failure) => (name.to_owned(), false, failure.message),
    };
    ["cpu", "reference", "cuda:0", "xpu:0"].map(row).into()
}
