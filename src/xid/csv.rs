//! Comma-separated values as RFC 4180 has them; empty lines are skipped.

/// Rows with the line on which each begins, from 1. After an error there are no more.
pub(super) fn rows(text: &str) -> Rows<'_> {
    Rows { rest: text.trim_start_matches('\u{feff}'), line: 1 }
}

pub(super) struct Rows<'t> {
    rest: &'t str,
    line: usize,
}

impl Iterator for Rows<'_> {
    type Item = Result<(usize, Vec<String>), (usize, String)>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.end_of_line() {}
        if self.rest.is_empty() {
            return None;
        }
        let begins = self.line;
        let mut cells = Vec::new();
        loop {
            match self.cell() {
                Ok(cell) => cells.push(cell),
                Err(message) => {
                    self.rest = "";
                    return Some(Err((begins, message)));
                }
            }
            if let Some(rest) = self.rest.strip_prefix(',') {
                self.rest = rest;
            } else {
                self.end_of_line();
                return Some(Ok((begins, cells)));
            }
        }
    }
}

impl Rows<'_> {
    /// Takes a line end, if one is next.
    fn end_of_line(&mut self) -> bool {
        let rest = self.rest.strip_prefix("\r\n").or_else(|| self.rest.strip_prefix('\n'));
        if let Some(rest) = rest {
            self.rest = rest;
            self.line += 1;
        }
        rest.is_some()
    }

    fn cell(&mut self) -> Result<String, String> {
        let Some(mut quoted) = self.rest.strip_prefix('"') else {
            let end = self.rest.find([',', '\n']).unwrap_or(self.rest.len());
            let (cell, rest) = self.rest.split_at(end);
            let ends_line = !rest.starts_with(',');
            self.rest = rest;
            return Ok(if ends_line { cell.strip_suffix('\r').unwrap_or(cell) } else { cell }.to_owned());
        };
        let mut cell = String::new();
        loop {
            let end = quoted.find('"').ok_or("a quoted cell does not end")?;
            cell.push_str(&quoted[..end]);
            quoted = &quoted[end + 1..];
            match quoted.strip_prefix('"') {
                Some(rest) => {
                    cell.push('"');
                    quoted = rest;
                }
                None => break,
            }
        }
        if !(quoted.is_empty() || quoted.starts_with([',', '\n']) || quoted.starts_with("\r\n")) {
            return Err("expected a comma or the end of the line after a quoted cell".into());
        }
        self.line += cell.matches('\n').count();
        self.rest = quoted;
        Ok(cell)
    }
}
