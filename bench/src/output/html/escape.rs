//! Escapes text that is not trusted.

/// Escapes text for use as content or in an attribute, for both HTML and XML. Characters not
/// allowed in XML are replaced, and also characters that change the direction of the text after
/// them.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\t' | '\n' | '\r' => escaped.push(' '),
            c if c.is_control() => escaped.push('\u{fffd}'),
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                escaped.push('\u{fffd}');
            }
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Escapes text and truncates it in the middle if it's longer than `limit` characters, because
/// names often have a common prefix and options differ at the end.
pub(super) fn shortened(text: &str, limit: usize) -> String {
    let all: Vec<char> = text.chars().collect();
    if all.len() <= limit {
        return escape(text);
    }
    let head = limit / 3;
    let tail = all.len() - (limit - head);
    let ends = all[..head].iter().chain(&['…']).chain(&all[tail..]);
    escape(&ends.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let hostile = "<b a=\"1\" c='2'>&\0\x1b\u{202e}\n";
        let escaped = "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;\u{fffd}\u{fffd}\u{fffd} ";
        assert_eq!(escape(hostile), escaped);
    }

    #[test]
    fn text_is_truncated_before_escaping() {
        assert_eq!(shortened("a<bcdef&", 3), "a…f&amp;");
        assert_eq!(shortened("äöü", 3), "äöü");
    }
}
