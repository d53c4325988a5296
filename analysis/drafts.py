from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.drafts", "analysis.heads drafts={NAME: FOLDER} responses={DOMAIN: FOLDER}")
