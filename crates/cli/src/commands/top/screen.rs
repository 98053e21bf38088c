//! The terminal while `clary top` runs.

use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::event::{Event, KeyCode, KeyModifiers, poll, read};
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{execute, queue};

use crate::error::Result;

/// The alternate screen. What stood on the terminal comes back when this is dropped.
pub(super) struct Screen;

impl Screen {
    /// Takes the terminal over.
    pub(super) fn open() -> Result<Self> {
        enable_raw_mode()?;
        let screen = Self;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        Ok(screen)
    }

    /// Draws lines, cut to the terminal's size.
    pub(super) fn draw(&self, text: &str) -> Result {
        let (columns, rows) = size()?;
        let mut out = stdout().lock();
        for (row, line) in text.lines().take(usize::from(rows)).enumerate() {
            let line: String = line.chars().take(usize::from(columns)).collect();
            queue!(out, MoveTo(0, row as u16), Clear(ClearType::UntilNewLine))?;
            out.write_all(line.as_bytes())?;
        }
        queue!(out, Clear(ClearType::FromCursorDown))?;
        Ok(out.flush()?)
    }

    /// Waits; true if the user wants to go.
    pub(super) fn left(&self, time: Duration) -> Result<bool> {
        let end = Instant::now() + time;
        loop {
            let rest = end.saturating_duration_since(Instant::now());
            if !poll(rest)? {
                return Ok(false);
            }
            if let Event::Key(key) = read()? {
                let is_interrupt =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                if is_interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                    return Ok(true);
                }
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone already.
        let _ = execute!(stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}
