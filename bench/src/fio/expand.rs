//! Preprocessing of lines: comments, variables and keywords.

/// Returns a number that depends on this host.
type HostNumber = fn() -> u64;

/// Keywords that are replaced by numbers of this host.
const WORDS: [(&str, HostNumber); 3] = [
    ("$ncpus", || {
        std::thread::available_parallelism().map_or(1, |count| count.get() as u64)
    }),
    ("$pagesize", || rustix::param::page_size() as u64),
    ("$mb_memory", || {
        let pages = rustix::system::sysinfo();
        pages.totalram.saturating_mul(pages.mem_unit.into()) >> 20
    }),
];

/// Removes a comment, which starts with `;` or `#`. As in fio, a value can't contain these
/// characters.
pub(super) fn without_comment(line: &str) -> &str {
    line.find([';', '#']).map_or(line, |at| &line[..at])
}

/// Replaces each `${NAME}` by the environment variable and fio's keywords by the numbers of this
/// host.
pub(super) fn expand(line: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = line;
    while let Some(start) = rest.find("${") {
        let (before, variable) = rest.split_at(start);
        let end = variable.find('}');
        let end = end.ok_or_else(|| format!("missing closing brace in `{variable}`"))?;
        let name = &variable[2..end];
        let value = env(name);
        let value = value.ok_or_else(|| format!("environment variable `{name}` is not set"))?;
        out += before;
        out += &value;
        rest = &variable[end + 1..];
    }
    out += rest;
    for (word, number) in WORDS {
        if out.contains(word) {
            out = out.replace(word, &number().to_string());
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_start_anywhere() {
        assert_eq!(without_comment("a=b;c#d"), "a=b");
        assert_eq!(without_comment("a=b #c;"), "a=b ");
        assert_eq!(without_comment("#a"), "");
    }

    #[test]
    fn keywords_expand_to_host_numbers() {
        let expanded = |line| expand(line, &|_| None).unwrap();
        let cpus: u64 = expanded("$ncpus").parse().unwrap();
        assert!(cpus >= 1);
        assert_eq!(
            expanded("bs=$pagesize"),
            format!("bs={}", rustix::param::page_size())
        );
        assert!(expanded("$mb_memory").parse::<u64>().unwrap() > 0);
        assert_eq!(expanded("a=$other"), "a=$other");
    }
}
