//! Checks the table in `SECURITY.md`: vulnerabilities of other projects, and the tests that would
//! fail here.

use riser_docs::root;

/// Parses identifiers in a list such as `CVE-2026-90413, 2026-90414` or
/// `CVE-2026-18724 … 2026-18728`. Returns them in the format used in test names.
fn ids(cell: &str) -> Vec<String> {
    let words = cell.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let numbered = words.filter_map(|word| {
        let word = word.strip_prefix("CVE-").unwrap_or(word);
        let (year, number) = word.split_once('-')?;
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        (is_number(year) && is_number(number)).then(|| format!("{year}_{number}"))
    });
    let scst = cell.strip_prefix("SCST ").map(|n| format!("scst_{n}"));
    numbered.chain(scst).collect()
}

/// Returns the rows of the regression table: the first and the last cell.
fn rows(text: &str) -> Vec<(&str, &str)> {
    let table = text.split("| --- |").skip(1);
    let table = table.filter(|rest| rest.contains("`cve_")).last();
    let lines = table.expect("a table of tests").lines().skip(1);
    let lines = lines.take_while(|line| line.starts_with('|'));
    let ends = lines.map(|line| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        (cells[0], cells[cells.len() - 1])
    });
    ends.collect()
}

/// Returns function names in backticks, with the preceding file names.
fn tests(cell: &str) -> Vec<(String, String)> {
    let (mut file, mut found) = (None, Vec::new());
    for span in cell.split('`').skip(1).step_by(2) {
        match span.strip_suffix("()") {
            Some(name) => {
                let file: &String = file.as_ref().expect("a file before its functions");
                found.push((file.clone(), name.to_owned()));
            }
            None => file = Some(span.to_owned()),
        }
    }
    found
}

#[test]
fn rows_name_existing_tests_with_ids() {
    let text = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
    let rows = rows(&text);
    assert!(rows.len() >= 25, "{} rows", rows.len());
    for (about, cell) in rows {
        let (ids, tests) = (ids(about), tests(cell));
        assert!(!ids.is_empty() && !tests.is_empty(), "{about}: {cell}");
        for (file, name) in &tests {
            let source = std::fs::read_to_string(root().join(file));
            let source = source.unwrap_or_else(|e| panic!("{file}: {e}"));
            // A scenario for several protocols is a parameter of a macro that creates its tests.
            let is_test = [
                format!("#[test]\nfn {name}()"),
                format!("#[test]\n    fn {name}()"),
                format!("\n    {name},\n"),
            ];
            let is_test = is_test.iter().any(|text| source.contains(text));
            assert!(is_test, "{file}: {name}()");
            assert!(ids.iter().any(|id| name.contains(id)), "{about}: {name}()");
        }
        for id in ids {
            let is_tested = tests.iter().any(|(_, name)| name.contains(&id));
            assert!(is_tested, "no test of {id}");
        }
    }
}

#[test]
fn table_lists_all_regression_tests() {
    let text = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
    for entry in walkdir::WalkDir::new(root()).into_iter().filter_entry(|e| {
        let name = e.file_name().to_string_lossy();
        e.depth() == 0 || !(name.starts_with('.') || name == "node_modules")
    }) {
        let entry = entry.unwrap();
        if entry.path().extension().is_none_or(|e| e != "rs") {
            continue;
        }
        let source = std::fs::read_to_string(entry.path()).unwrap();
        for name in source
            .split("fn ")
            .skip(1)
            .filter_map(|rest| rest.split(['(', '<']).next())
        {
            let is_one = name.starts_with("cve_") || name.starts_with("scst_");
            let is_listed = text.contains(&format!("`{name}()`"));
            assert!(!is_one || is_listed, "{name} in {}", entry.path().display());
        }
    }
}
