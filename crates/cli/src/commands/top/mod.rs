//! `clary top`: what a running server is doing.

mod screen;
mod view;

use std::io::IsTerminal;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;

use self::screen::Screen;
use crate::args::count;
use crate::client::{self, Client};
use crate::error::Result;
use crate::numbers::Numbers;
use crate::output::Output;

/// `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The server; CLARY_API_KEY is its key
    #[arg(long, value_name = "URL", default_value = client::URL)]
    pub(crate) url: String,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub(crate) every: f64,
    /// Looks to take [default: until q or Ctrl-C]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) count: Option<usize>,
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.1..=3600.0).contains(value));
    value.ok_or("a number from 0.1 to 3600".into())
}

/// One look at a server.
#[derive(Clone, Debug)]
struct Look {
    at: Instant,
    /// Served id and version.
    title: String,
    ready: Value,
    slots: Value,
    numbers: Numbers,
}

impl Look {
    fn take(client: &Client) -> Result<Self> {
        let models = client.get("/v1/models")?.ok("/v1/models")?.json();
        let version = client.get("/version")?.ok("/version")?.json();
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let title = format!(
            "{}  clary {} {}",
            text(&models["data"][0]["id"]),
            text(&version["version"]),
            text(&version["backend"])
        );
        Ok(Self {
            at: Instant::now(),
            title,
            // 503 with a reason is an answer, too.
            ready: client.get("/ready")?.json(),
            slots: client.get("/slots")?.ok("/slots")?.json(),
            numbers: Numbers::read(&client.get("/metrics")?.ok("/metrics")?.body),
        })
    }
}

/// Shows the server until `q` or Ctrl-C, or as often as asked for. Rates are those since the last look.
pub(crate) fn top(args: &TopArgs, output: &Output) -> Result {
    let client = Client::new(&args.url)?;
    let mut before = Look::take(&client)?;
    let is_live = std::io::stdout().is_terminal() && !output.json;
    let screen = is_live.then(Screen::open).transpose()?;
    let every = Duration::from_secs_f64(args.every);
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        match &screen {
            Some(screen) if screen.left(every)? => return Ok(()),
            Some(_) => {}
            None => sleep(every),
        }
        let now = Look::take(&client)?;
        match (&screen, output.json) {
            (Some(screen), _) => screen.draw(&view::text(&now, &before, &client.base))?,
            (None, true) => output.out(&format!("{}\n", view::document(&now, &before)))?,
            (None, false) => {
                let gap = if shown > 0 { "\n" } else { "" };
                output.out(&format!("{gap}{}", view::text(&now, &before, &client.base)))?;
            }
        }
        before = now;
        shown += 1;
    }
    Ok(())
}
