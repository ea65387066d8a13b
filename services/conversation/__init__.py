"""Owns users' messages and their ended replies: accepts, assembles, archives.

assembly(P)   a context as token ids, inside the budget      template(E)  the chat template, in jinja2's sandbox
replies(P)    a reply's states as a table                    prompts(E)   the models' tokenizers and templates
key_store(E)  API keys                                       store(E)     rows, in PostgreSQL
sending(S)    the way of one message into its lane           verbs(S)     get, cancel, delete, withdraw ...
conversations(S)  the line of replies a message joins       contexts(S)  a message's history as pieces of ids
archive(S)    ended replies into rows                        guards(S)    outbox, sweeper, purges: what a crash left
"""
