//! A minimal shell parser that finds the programs that a line calls, with their arguments.

/// Returns the commands of a text as lists of words, without comments, redirections and leading assignments.
pub fn commands(text: &str) -> Vec<Vec<String>> {
    let text = text.replace("\\\n", " ");
    let mut reader = Reader::default();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if let Some(end) = reader.quote {
            match c {
                c if c == end => reader.quote = None,
                '\\' if end == '"' => reader.put(chars.next().unwrap_or_default()),
                c => reader.put(c),
            }
            continue;
        }
        match c {
            '\'' | '"' => {
                reader.quote = Some(c);
                reader.word.get_or_insert_default();
            }
            '\\' => reader.put(chars.next().unwrap_or_default()),
            '#' if reader.word.is_none() => {
                chars.find(|it| *it == '\n');
                reader.end_command();
            }
            '\n' | '|' | ';' | '&' | '(' | ')' => reader.end_command(),
            '<' | '>' => {
                // The digit of `2>` belongs to the redirection and is not a word.
                if reader
                    .word
                    .as_ref()
                    .is_some_and(|it| it.chars().all(|c| c.is_ascii_digit()))
                {
                    reader.word = None;
                }
                reader.end_word();
                reader.to_file = true;
            }
            c if c.is_whitespace() => reader.end_word(),
            c => reader.put(c),
        }
    }
    reader.end_command();
    reader.all
}

#[derive(Default)]
struct Reader {
    all: Vec<Vec<String>>,
    words: Vec<String>,
    word: Option<String>,
    quote: Option<char>,
    to_file: bool,
}

impl Reader {
    fn put(&mut self, c: char) {
        self.word.get_or_insert_default().push(c);
    }

    fn end_word(&mut self) {
        let Some(word) = self.word.take() else { return };
        let sets = |(name, _): (&str, &str)| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
        };
        let assigns = self.words.is_empty() && word.split_once('=').is_some_and(sets);
        if !std::mem::take(&mut self.to_file) && !assigns {
            self.words.push(word);
        }
    }

    fn end_command(&mut self) {
        self.end_word();
        self.to_file = false;
        let words = std::mem::take(&mut self.words);
        if !words.is_empty() {
            self.all.push(words);
        }
    }
}

#[test]
fn commands_are_read_as_a_shell_would() {
    let text = "A=1 B=$X make run  # make nothing\n\
                kubectl cadastre check -o json 2>/dev/null > a.json && source <(x completion bash)\n\
                helm y \\\n  --set 'a={b,c}' \"d\\\"e f\" | sort -u; echo a#b & z\n";
    let all: Vec<String> = commands(text).iter().map(|it| it.join("·")).collect();
    assert_eq!(
        all,
        [
            "make·run",
            "kubectl·cadastre·check·-o·json",
            "source",
            "x·completion·bash",
            "helm·y·--set·a={b,c}·d\"e f",
            "sort·-u",
            "echo·a#b",
            "z"
        ]
    );
}
