//! A server of this program's own, for a soak of a MODEL.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;

use super::SoakArgs;
use crate::error::{Exit, Failure, Result};

/// A server as a process. Killed when dropped before [`Self::end`].
pub(super) struct Server {
    child: Child,
    /// Where it listens.
    pub(super) url: String,
}

impl Server {
    /// Starts `clary serve MODEL` on a free port and waits until it is ready. What it says goes to stderr.
    pub(super) fn start(model: &str, args: &SoakArgs) -> Result<Self> {
        let failed = |error: std::io::Error| Failure::new(Exit::Failure, format!("the server: {error}"));
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["serve", model, "--host", "127.0.0.1", "--port", "0", "--json", "--quiet"]);
        command.args(["--slots", &args.slots().to_string(), "--queue-timeout", "1h"]);
        for (name, value) in [("--device", &args.device), ("--ctx", &args.ctx), ("--draft", &args.draft)] {
            if let Some(value) = value {
                command.args([name, value]);
            }
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let mut report = String::new();
        let out = child.stdout.take().expect("stdout is piped");
        let mut server = Self { child, url: String::new() };
        BufReader::new(out).read_line(&mut report).map_err(failed)?;
        let report: Value = serde_json::from_str(&report).unwrap_or_default();
        match report["address"].as_str() {
            Some(address) => server.url = address.to_owned(),
            None => {
                let status = server.child.wait().map_err(failed)?;
                let failure = Failure::new(exit(status), "the server did not start");
                return Err(failure.hint("its own words are above; `clary serve MODEL` gives all of them"));
            }
        }
        Ok(server)
    }

    /// Ends it in good order; says what was not.
    pub(super) fn end(mut self) -> std::result::Result<(), String> {
        let told = |error: std::io::Error| format!("the server's end: {error}");
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM)
            .map_err(|error| told(error.into()))?;
        let status = self.child.wait().map_err(told)?;
        if status.success() { Ok(()) } else { Err(format!("the server ended with {status}")) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already where all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn exit(status: ExitStatus) -> Exit {
    let codes = [Exit::Usage, Exit::Model, Exit::Memory, Exit::Device, Exit::Mismatch];
    codes.into_iter().find(|code| status.code() == Some(*code as i32)).unwrap_or(Exit::Failure)
}
