//! How deep a chat template's syntax may nest.
//!
//! The template engine bounds brackets and blocks, but its parser and its code generator also recurse over
//! what needs no bracket: chains of operators, attributes, filters and `elif`. A template is a file from
//! outside, so these are bounded before it is compiled, and it is compiled on a stack that bears the bound.

use std::thread;

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
    let mut at = 0;
    while let Some(open) = source[at..].find("{") {
        let start = at + open;
        let rest = &source[start + 1..];
        at = start + 1;
        if rest.starts_with('#') {
            at += rest.find("#}").unwrap_or(rest.len());
        } else if rest.starts_with(['{', '%']) {
            let block = Block::read(&rest.as_bytes()[1..]);
            if block.code > BLOCK_CODE_MAX {
                let detail = format!("more than {BLOCK_CODE_MAX} bytes of code in one block");
                return Err(refuse(start, detail));
            }
            elifs += usize::from(block.is_elif);
            if elifs > ELIF_MAX {
                return Err(refuse(start, format!("more than {ELIF_MAX} elif")));
            }
            at += 1 + block.bytes;
        }
    }
    Ok(())
}

/// What stands between `{{` and `}}`, or `{%` and `%}`.
struct Block {
    /// Its length.
    bytes: usize,
    /// Bytes that are neither space nor inside a string.
    code: usize,
    is_elif: bool,
}

impl Block {
    fn read(text: &[u8]) -> Self {
        let word = text.trim_ascii_start();
        let word = word.strip_prefix(b"-").or(word.strip_prefix(b"+")).unwrap_or(word).trim_ascii_start();
        let is_elif = word.starts_with(b"elif");
        let (mut bytes, mut code) = (0, 0);
        while bytes < text.len() && code <= BLOCK_CODE_MAX {
            match text[bytes] {
                b'}' | b'%' if text.get(bytes + 1) == Some(&b'}') => break,
                quote @ (b'\'' | b'"') => {
                    code += 1;
                    bytes += 1;
                    while bytes < text.len() && text[bytes] != quote {
                        bytes += if text[bytes] == b'\\' { 2 } else { 1 };
                    }
                }
                space if space.is_ascii_whitespace() => {}
                _ => code += 1,
            }
            bytes += 1;
        }
        // A character that is not ASCII is never cut: blocks end at ASCII, or at the end.
        Self { bytes: bytes.min(text.len()), code, is_elif }
    }
}

/// Runs the compiler, or a template, on a stack of its own.
pub(crate) fn with_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, TextError> {
    let failed = |detail: String| TextError::TemplateFailed { line: 0, detail };
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("clary-template".to_owned()).stack_size(bytes);
        let thread = builder
            .spawn_scoped(scope, work)
            .map_err(|error| failed(format!("no thread with {bytes} bytes of stack for it: {error}")))?;
        thread.join().map_err(|_| failed("the template engine failed".to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_measured() {
        let check_all = |text: &str, wanted: (usize, usize, bool)| {
            let block = Block::read(text.as_bytes());
            assert_eq!((block.bytes, block.code, block.is_elif), wanted, "{text}");
        };
        check_all(" a.b }} c", (5, 3, false));
        check_all("- elif x %}", (9, 6, true));
        check_all(" '}} \\' ' }}", (10, 1, false));
        check_all(" \"é\\", (5, 1, false));
        check_all("", (0, 0, false));
    }

    #[test]
    fn long_text_and_strings_are_no_code() {
        let text = "é{ ".repeat(BLOCK_CODE_MAX);
        let string = format!("{{{{ '{text}' }}}}{{# {text} #}}{text}");
        assert!(check(&string).is_ok());
        let long = format!("\n{{{{ {}1 }}}}", "-".repeat(BLOCK_CODE_MAX));
        assert!(matches!(check(&long), Err(TextError::TemplateSyntax { line: 2, .. })));
    }
}
