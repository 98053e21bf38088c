//! Regular expressions from outside: read, bounded, and turned into ones that match a whole text.

use regex_syntax::ast::parse::ParserBuilder;
use regex_syntax::ast::{self, AssertionKind, Ast, ClassPerl, ClassPerlKind, GroupKind, Visitor};

use super::error::GrammarError;

/// Longest regular expression, bytes.
pub const REGEX_BYTES_MAX: usize = 8 << 10;
/// Deepest nesting of groups.
const NEST_MAX: u32 = 64;
/// Any text.
const ANYTHING: &str = "(?s:.*)";

/// How letters of the expression are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// ECMA 262, as JSON Schema says: matches somewhere in the text.
    Schema,
    /// That of the regex crate: matches the whole text, anchored or not.
    Whole,
}

/// An expression without anchors that matches exactly the texts the given one accepts.
pub(super) fn whole(text: &str, dialect: Dialect, at: &str) -> Result<String, GrammarError> {
    if text.len() > REGEX_BYTES_MAX {
        let detail = format!("{} bytes of regular expression, at most {REGEX_BYTES_MAX}", text.len());
        return Err(GrammarError::too_complex(at, detail));
    }
    let ast = ParserBuilder::new().nest_limit(NEST_MAX).build().parse(text).map_err(|e| refusal(&e, at))?;
    let finder = Finder { dialect, edits: Vec::new(), anchors: 0, flags: false };
    let finder = ast::visit(&ast, finder).map_err(|what| GrammarError::unsupported(at, what))?;
    if finder.flags && (dialect == Dialect::Schema || finder.anchors > 0) {
        let detail = "flags in a regular expression are not supported here; spell both cases out";
        return Err(GrammarError::unsupported(at, detail));
    }
    if finder.anchors == 0 && dialect == Dialect::Whole {
        return Ok(text.to_owned());
    }
    let mut branches = Vec::new();
    let seen = split(&ast, &mut branches);
    if seen != finder.anchors {
        let detail = "^ may stand only at the beginning and $ only at the end of an alternative";
        return Err(GrammarError::unsupported(at, detail));
    }
    let open = |anchored: bool| if anchored || dialect == Dialect::Whole { "" } else { ANYTHING };
    let branches = branches.iter().map(|branch| {
        let body = finder.edited(text, branch.from, branch.to);
        format!("{}(?:{body}){}", open(branch.starts), open(branch.ends))
    });
    Ok(format!("(?:{})", branches.collect::<Vec<_>>().join("|")))
}

fn refusal(error: &ast::Error, at: &str) -> GrammarError {
    use ast::ErrorKind;
    let place = error.span().start.offset;
    match error.kind() {
        ErrorKind::NestLimitExceeded(_) => {
            GrammarError::too_complex(at, format!("groups nested deeper than {NEST_MAX} at byte {place}"))
        }
        ErrorKind::UnsupportedLookAround | ErrorKind::UnsupportedBackreference => {
            let detail = format!("look-around and back-references (byte {place}) are not supported");
            GrammarError::unsupported(at, detail)
        }
        kind => GrammarError::invalid(at, format!("not a regular expression: {kind} at byte {place}")),
    }
}

/// One alternative at the top, without its anchors.
struct Branch {
    starts: bool,
    ends: bool,
    from: usize,
    to: usize,
}

/// Finds the alternatives; the answer is the number of anchors taken off.
fn split(ast: &Ast, branches: &mut Vec<Branch>) -> usize {
    match ast {
        Ast::Alternation(alternation) => alternation.asts.iter().map(|ast| split(ast, branches)).sum(),
        Ast::Group(group) => split(&group.ast, branches),
        Ast::Concat(concat) => {
            let starts = concat.asts.iter().take_while(|ast| is_anchor(ast, true)).count();
            let rest = &concat.asts[starts..];
            let ends = rest.iter().rev().take_while(|ast| is_anchor(ast, false)).count();
            let rest = &rest[..rest.len() - ends];
            let from = rest.first().map_or(0, |ast| ast.span().start.offset);
            let to = rest.last().map_or(from, |ast| ast.span().end.offset);
            branches.push(Branch { starts: starts > 0, ends: ends > 0, from, to });
            starts + ends
        }
        ast => {
            let (starts, ends) = (is_anchor(ast, true), is_anchor(ast, false));
            let from = ast.span().start.offset;
            let to = if starts || ends { from } else { ast.span().end.offset };
            branches.push(Branch { starts, ends, from, to });
            usize::from(starts || ends)
        }
    }
}

fn is_anchor(ast: &Ast, start: bool) -> bool {
    let Ast::Assertion(assertion) = ast else { return false };
    match assertion.kind {
        AssertionKind::StartLine | AssertionKind::StartText => start,
        AssertionKind::EndLine | AssertionKind::EndText => !start,
        _ => false,
    }
}

/// Collects what must be spelled otherwise.
struct Finder {
    dialect: Dialect,
    /// From, to, new spelling; ascending.
    edits: Vec<(usize, usize, String)>,
    anchors: usize,
    flags: bool,
}

impl Finder {
    fn edited(&self, text: &str, from: usize, to: usize) -> String {
        let mut out = String::with_capacity(to - from);
        let mut at = from;
        for (start, end, spelling) in self.edits.iter().filter(|(start, end, _)| from <= *start && *end <= to)
        {
            out.push_str(&text[at..*start]);
            out.push_str(spelling);
            at = *end;
        }
        out.push_str(&text[at..to]);
        out
    }

    fn perl(&mut self, class: &ClassPerl) {
        let items = match class.kind {
            ClassPerlKind::Digit => "0-9",
            ClassPerlKind::Word => "0-9A-Za-z_",
            ClassPerlKind::Space => concat!(
                r"\t\n\x0B\x0C\r \u{a0}\u{1680}\u{2000}-\u{200a}",
                r"\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
            ),
        };
        let not = if class.negated { "^" } else { "" };
        self.edit(class.span, format!("[{not}{items}]"));
    }

    fn edit(&mut self, span: ast::Span, spelling: String) {
        if self.dialect == Dialect::Schema {
            self.edits.push((span.start.offset, span.end.offset, spelling));
        }
    }
}

impl Visitor for Finder {
    type Output = Self;
    type Err = &'static str;

    fn finish(mut self) -> Result<Self, Self::Err> {
        self.edits.sort();
        Ok(self)
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Self::Err> {
        match ast {
            Ast::Dot(span) => self.edit(**span, r"[^\n\r\u{2028}\u{2029}]".to_owned()),
            Ast::ClassPerl(class) => self.perl(class),
            Ast::Flags(_) => self.flags = true,
            Ast::Group(group) => {
                if let GroupKind::NonCapturing(flags) = &group.kind {
                    self.flags |= !flags.items.is_empty();
                }
            }
            Ast::Assertion(assertion) => match assertion.kind {
                AssertionKind::WordBoundary | AssertionKind::NotWordBoundary => {
                    return Err("\\b and \\B are not supported");
                }
                _ => self.anchors += 1,
            },
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ast::ClassSetItem) -> Result<(), Self::Err> {
        match item {
            ast::ClassSetItem::Perl(class) => self.perl(class),
            // ECMA reads these letter by letter.
            ast::ClassSetItem::Ascii(_) | ast::ClassSetItem::Bracketed(_)
                if self.dialect == Dialect::Schema =>
            {
                return Err("write \\[ for a bracket inside a character class");
            }
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_binary_op_pre(&mut self, _: &ast::ClassSetBinaryOp) -> Result<(), Self::Err> {
        match self.dialect {
            Dialect::Schema => Err("&&, -- and ~~ in a character class are not supported"),
            Dialect::Whole => Ok(()),
        }
    }
}
