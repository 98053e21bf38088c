//! `clary bundle`: one recorded request, taken out of the folder of a server.

use std::io::Write;

use server::http::BUNDLE_EXTENSION;

use super::{BundleArgs, files};
use crate::error::{Failure, Result};
use crate::output::Output;
use crate::target::Target;

/// Checks the recorded request of an id and writes it to a file or to stdout.
pub(crate) fn bundle(args: &BundleArgs, output: &Output) -> Result {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if args.request_id.is_empty() || !args.request_id.bytes().all(is_plain) {
        let message = format!("{:?} is no request id", args.request_id);
        return Err(Failure::usage(message).hint("X-Request-Id of the reply, such as req_8fK2..."));
    }
    let path = args.record.join(format!("{}.{BUNDLE_EXTENSION}", args.request_id));
    if !path.exists() {
        let message = format!("{}: no record of {}", args.record.display(), args.request_id);
        let hint = "only `serve --record DIR` keeps requests, and only those that ran";
        return Err(Failure::usage(message).hint(hint));
    }
    let bundle = files::bundle(&path)?;
    let text = format!("{:#}\n", serde_json::json!(bundle));
    let Some(out) = &args.out else { return Ok(output.out(&text)?) };
    let mut target = Target::private(out)?;
    target.file.write_all(text.as_bytes()).map_err(|error| target.failed(&error))?;
    target.finish()
}
