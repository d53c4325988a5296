# Became part of analysis.heads: drafts of one target, side by side.
from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.drafts", "analysis.heads drafts={NAME: FOLDER} responses={DOMAIN: FOLDER}")
