//! How deep a chat template's syntax may nest.
//!
//! The template engine bounds brackets and blocks, but its parser and its code generator also recurse over
//! what needs no bracket: chains of operators, attributes, filters and `elif`. A template is a file from
//! outside, so these are bounded before it is compiled, and it is compiled on a stack that bears the bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::error::TextError;

/// Most bytes of code in one `{{ }}` or `{% %}`, strings and spaces not counted. Each byte is at most one
/// level; published templates stay below 1 KiB.
pub(crate) const BLOCK_CODE_MAX: usize = 8 << 10;
/// Most `elif` of a template; each is at most one level.
pub(crate) const ELIF_MAX: usize = 1024;
/// Bytes of stack for compiling: far above what the bounds need, even without optimization. Only pages that
/// are used take memory.
pub(crate) const STACK_BYTES: usize = 256 << 20;

/// Refuses a template whose syntax could nest too deep.
pub(crate) fn check(source: &str) -> Result<(), TextError> {
    let refuse = |at: usize, detail: String| TextError::TemplateSyntax {
        line: 1 + source.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count(),
        detail,
    };
    let mut elifs = 0;
    for (start, block) in blocks(source) {
        if block.code > BLOCK_CODE_MAX {
            let detail = format!("more than {BLOCK_CODE_MAX} bytes of code in one block");
            return Err(refuse(start, detail));
        }
        elifs += usize::from(block.is_elif);
        if elifs > ELIF_MAX {
            return Err(refuse(start, format!("more than {ELIF_MAX} elif")));
        }
    }
    Ok(())
}

/// The blocks of a template, and the bytes at which they begin. A block with too much code may be cut.
pub(crate) fn blocks(source: &str) -> impl Iterator<Item = (usize, Block<'_>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        while let Some(open) = source[at..].find('{') {
            let start = at + open;
            let rest = &source[start + 1..];
            at = start + 1;
            if rest.starts_with('#') {
                at += rest.find("#}").unwrap_or(rest.len());
            } else if rest.starts_with(['{', '%']) {
                let block = Block::read(rest);
                at += 1 + block.text.len();
                return Some((start, block));
            }
        }
        None
    })
}

/// What stands between `{{` and `}}`, or `{%` and `%}`.
pub(crate) struct Block<'s> {
    /// What stands there.
    pub(crate) text: &'s str,
    /// Bytes that are neither space nor inside a string.
    code: usize,
    is_elif: bool,
}

impl<'s> Block<'s> {
    /// Reads a block from its second mark on. As in the engine, a block ends at its own kind of end and
    /// outside of all brackets; what else looks like an end is code.
    fn read(marked: &'s str) -> Self {
        let end: &[u8] = if marked.starts_with('{') { b"}}" } else { b"%}" };
        let text = &marked.as_bytes()[1..];
        let word = text.trim_ascii_start();
        let word = word.strip_prefix(b"-").or(word.strip_prefix(b"+")).unwrap_or(word).trim_ascii_start();
        let is_elif = word.starts_with(b"elif");
        let (mut bytes, mut code, mut open) = (0, 0, 0_isize);
        while bytes < text.len() && code <= BLOCK_CODE_MAX {
            if open == 0 && text[bytes..].starts_with(end) {
                break;
            }
            match text[bytes] {
                quote @ (b'\'' | b'"') => {
                    code += 1;
                    bytes += 1;
                    while bytes < text.len() && text[bytes] != quote {
                        bytes += if text[bytes] == b'\\' { 2 } else { 1 };
                    }
                }
                space if space.is_ascii_whitespace() => {}
                other => {
                    code += 1;
                    open += match other {
                        b'(' | b'[' | b'{' => 1,
                        b')' | b']' | b'}' => -1,
                        _ => 0,
                    };
                }
            }
            bytes += 1;
        }
        // Where it is cut because of its length, this may be inside of a character.
        let end = (0..=bytes.min(text.len())).rev().find(|&end| marked.is_char_boundary(1 + end));
        Self { text: &marked[1..1 + end.unwrap_or(0)], code, is_elif }
    }
}

/// Runs the compiler on a stack of its own.
pub(crate) fn with_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, TextError> {
    thread::scope(|scope| {
        let thread = named(bytes).spawn_scoped(scope, work).map_err(|error| no_thread(bytes, &error))?;
        thread.join().map_err(|_| panicked())
    })
}

/// Threads that still ran when nobody waited for them any more.
#[derive(Debug, Default)]
pub(crate) struct Late(AtomicUsize);

impl Late {
    /// Most of them: what needs more is not begun.
    const MAX: usize = 2;

    /// Runs a template on a stack of its own for so long at most; `None` if it did not come to an end.
    pub(crate) fn within<T: Send + 'static>(
        self: &Arc<Self>,
        time: Duration,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Option<T>, TextError> {
        if self.0.load(Ordering::SeqCst) >= Self::MAX {
            return Ok(None);
        }
        // The first to set it goes; the second knows that the other has gone.
        let gone = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::sync_channel(1);
        let (late, left) = (self.clone(), gone.clone());
        let work = move || {
            let _ = sender.send(work());
            if left.swap(true, Ordering::SeqCst) {
                late.0.fetch_sub(1, Ordering::SeqCst);
            }
        };
        named(bytes).spawn(work).map_err(|error| no_thread(bytes, &error))?;
        match receiver.recv_timeout(time) {
            Ok(done) => Ok(Some(done)),
            Err(RecvTimeoutError::Disconnected) => Err(panicked()),
            Err(RecvTimeoutError::Timeout) => {
                self.0.fetch_add(1, Ordering::SeqCst);
                if gone.swap(true, Ordering::SeqCst) {
                    self.0.fetch_sub(1, Ordering::SeqCst);
                }
                Ok(None)
            }
        }
    }
}

fn named(stack_bytes: usize) -> thread::Builder {
    thread::Builder::new().name("clary-template".to_owned()).stack_size(stack_bytes)
}

fn no_thread(bytes: usize, error: &std::io::Error) -> TextError {
    let detail = format!("no thread with {bytes} bytes of stack for it: {error}");
    TextError::TemplateFailed { line: 0, detail }
}

fn panicked() -> TextError {
    TextError::TemplateFailed { line: 0, detail: "the template engine failed".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_measured() {
        let check_all = |text: &str, wanted: (usize, usize, bool)| {
            let block = Block::read(text);
            assert_eq!((block.text.len(), block.code, block.is_elif), wanted, "{text}");
        };
        check_all("{ a.b }} c", (5, 3, false));
        check_all("%- elif x %}", (9, 6, true));
        check_all("{ '}} \\' ' }}", (10, 1, false));
        check_all("{ \"é\\", (5, 1, false));
        check_all("{", (0, 0, false));
        // Ends inside of brackets and of the other kind are code.
        check_all("{ {'a':{}} - b }} c", (14, 8, false));
        check_all("{ 1 %} - b }} c", (14, 8, false));
        check_all("% {1: {}} %} c", (9, 6, false));
    }

    #[test]
    fn long_text_and_strings_are_no_code() {
        let text = "é{ ".repeat(BLOCK_CODE_MAX);
        let string = format!("{{{{ '{text}' }}}}{{# {text} #}}{text}");
        assert!(check(&string).is_ok());
        let long = format!("\n{{{{ {}1 }}}}", "-".repeat(BLOCK_CODE_MAX));
        assert!(matches!(check(&long), Err(TextError::TemplateSyntax { line: 2, .. })));
        // Characters of several bytes are not cut.
        let wide = format!("{{{{ {} }}}}", "é".repeat(BLOCK_CODE_MAX));
        assert!(check(&wide).is_err());
    }

    #[test]
    fn nobody_waits_for_what_does_not_end() {
        let late = Arc::new(Late::default());
        let (go, wait) = mpsc::sync_channel::<()>(0);
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let endless = || {
            let wait = wait.clone();
            late.within(Duration::ZERO, 1 << 16, move || wait.lock().map(|wait| wait.recv().is_ok()).is_ok())
        };
        for _ in 0..Late::MAX {
            assert_eq!(endless().unwrap(), None);
        }
        let quick = || late.within(Duration::from_secs(600), 1 << 16, || 7).unwrap();
        assert_eq!(quick(), None);
        // When they have come to an end others may begin.
        for _ in 0..Late::MAX {
            go.send(()).unwrap();
        }
        while late.0.load(Ordering::SeqCst) > 0 {
            thread::yield_now();
        }
        assert_eq!(quick(), Some(7));
    }
}
