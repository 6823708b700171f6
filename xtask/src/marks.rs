//! Generated sections in documents, with a marker before and after the content.

/// Replaces the content between the markers.
pub(crate) fn replaced(text: &str, marks: &[&str; 2], part: &str) -> Result<String, String> {
    let [begin, end] = *marks;
    let missing = |mark| format!("missing line `{mark}`");
    let (head, rest) = text.split_once(begin).ok_or_else(|| missing(begin))?;
    let (_, tail) = rest.split_once(end).ok_or_else(|| missing(end))?;
    Ok(format!("{head}{begin}\n\n{}\n\n{end}{tail}", part.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_part_is_replaced() {
        let (begin, end) = ("<!-- begin -->", "<!-- end -->");
        let marks = [begin, end];
        let text = format!("before\n\n{begin}\n\nold\n\n{end}\n\nafter\n");
        let new = replaced(&text, &marks, "new\n").unwrap();
        assert_eq!(new, format!("before\n\n{begin}\n\nnew\n\n{end}\n\nafter\n"));
        let missing = |text: &str| replaced(text, &marks, "new").unwrap_err();
        assert!(missing("before\n").contains(begin));
        assert!(missing(begin).contains(end));
    }
}
