//! `clary version`.

use serde_json::json;

use crate::error::Result;
use crate::output::Output;

/// The commit this build was made from, where the build knew it: see `build.rs`.
const COMMIT: Option<&str> = option_env!("CLARY_COMMIT");

/// The commit as servers and receipts name it; empty where it is not known.
pub(crate) fn commit() -> &'static str {
    COMMIT.unwrap_or_default()
}

/// Prints what this build is.
pub(crate) fn version(output: &Output) -> Result {
    let version = env!("CARGO_PKG_VERSION");
    let commit = COMMIT;
    let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    let isa = device::cpu::Isa::detect().name();
    if output.json {
        let document = json!({"version": version, "commit": commit, "target": target, "isa": isa});
        return Ok(output.document(&document)?);
    }
    let commit = commit.map(|commit| format!(" (commit {commit})")).unwrap_or_default();
    Ok(output.out(&format!("clary {version}{commit}\ntarget {target}\nisa {isa}\n"))?)
}
