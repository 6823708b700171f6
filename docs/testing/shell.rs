//! Parses the simple commands of a shell script, for the syntax used in documents: pipes and lists,
//! quotes, comments, continued lines, here-documents, redirections, and assignments before a
//! command.

/// A command of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The program and its arguments, without assignments and redirections.
    pub words: Vec<String>,
    /// Number of its first line, starting at 1.
    pub line: usize,
}

/// Splits a script into its commands.
#[must_use]
pub fn commands(script: &str) -> Vec<Command> {
    let mut commands = Vec::new();
    let mut lines = script.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let mut whole = line.to_owned();
        while whole.ends_with('\\') {
            whole.pop();
            whole += lines.next().map_or("", |(_, next)| next);
        }
        if let Some((_, end)) = whole.split_once("<<") {
            let end = end.split_whitespace().next().unwrap_or_default();
            let end = end.trim_matches(['\'', '"', '-']).to_owned();
            // The contents of a here-document are not commands.
            lines.by_ref().find(|(_, line)| *line == end);
        }
        for part in parts(&whole) {
            let words = shlex::split(&part).unwrap_or_default();
            let words = without_redirections(words);
            if !words.is_empty() {
                let line = number + 1;
                commands.push(Command { words, line });
            }
        }
    }
    commands
}

/// Splits a line at `|`, `;` and `&` outside of quotes and `$(…)`, and removes the comment.
fn parts(line: &str) -> Vec<String> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let (mut quote, mut depth, mut last) = (None, 0, ' ');
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), _) => quote = (c != open).then_some(open),
            (None, '\'' | '"') => quote = Some(c),
            (None, '(') => depth += 1,
            (None, ')') => depth -= 1,
            (None, '#') if last.is_whitespace() => break,
            // Part of `2>&1`.
            (None, '&') if last == '>' => {}
            (None, '|' | ';' | '&') if depth == 0 => {
                parts.push(std::mem::take(&mut part));
                last = ' ';
                continue;
            }
            _ => {}
        }
        part.push(c);
        last = c;
        if c == '\\' {
            part.extend(chars.next());
        }
    }
    parts.push(part);
    parts
}

/// Removes redirections with their files, and assignments before the command.
fn without_redirections(words: Vec<String>) -> Vec<String> {
    let (mut kept, mut words) = (Vec::new(), words.into_iter());
    while let Some(word) = words.next() {
        let operator = word.trim_start_matches(|c: char| c.is_ascii_digit());
        if let Some(file) = operator.strip_prefix(['>', '<']) {
            if file.trim_start_matches(['>', '<']).is_empty() {
                words.next();
            }
        } else if !(kept.is_empty() && is_assignment(&word)) {
            kept.push(word);
        }
    }
    kept
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_syntax_is_stripped_from_commands() {
        let script = "A=1 B_C=... riser discover 'x y?a=1&b=2'    # a comment\n\
                      cat > f <<'END'\nriser not a command\nEND\n\
                      riserd run --config f 2> log &\n\
                      riser a \\\n    --b | grep 'c;d' > e; kill $!; wait\n\
                      # nothing\n";
        let found: Vec<_> = commands(script)
            .into_iter()
            .map(|c| (c.line, c.words.join(" ")))
            .collect();
        let expected = [
            (1, "riser discover x y?a=1&b=2"),
            (2, "cat"),
            (5, "riserd run --config f"),
            (6, "riser a --b"),
            (6, "grep c;d"),
            (6, "kill $!"),
            (6, "wait"),
        ];
        let found: Vec<_> = found.iter().map(|(l, c)| (*l, c.as_str())).collect();
        assert_eq!(found, expected);
    }
}
